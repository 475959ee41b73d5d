"""Token shards from a stream of documents, on several processes; and the sample that a tokenizer is trained on.

The shards do not depend on the number of processes. stages/prepare.py chooses the text, data/ has the format of shards.
"""
