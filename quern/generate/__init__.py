"""Generation: sampling, the key-value cache, the engine that decodes many conversations at once, and tools.

The caller loads the model; checkpoints and protocols are in other packages.
"""
