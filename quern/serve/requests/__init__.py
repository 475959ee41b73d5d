"""What requests look like: the fields of OpenAI's API with their limits, and the errors that name a wrong one.

Nothing here answers a request. Of the model, it needs the chat format and the compiled forms of replies only.
"""
