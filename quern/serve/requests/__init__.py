"""What requests look like: the fields of OpenAI's API with their limits, and the errors that name a wrong one.

Nothing here answers a request, or knows of a model but for its tokenizer and its chat format.
"""
