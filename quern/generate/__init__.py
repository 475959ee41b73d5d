"""Generation: sampling, the key-value cache, the engine that decodes many conversations at once, and tools.

It runs a model that is handed to it; it loads no checkpoint and serves no protocol.
"""
