"""Token shards, packing, loaders and batches: from token ids to what one training step reads.

NumPy only, shared by the PyTorch and the JAX trainer. A batch is a pure function of (seed, step).
"""
