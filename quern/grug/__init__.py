"""The JAX twin: the same model, optimizer and loss with explicit sharding. It imports no torch.

Its stages are in stages/jax/; laws hold its loss and gradients to the PyTorch model's.
"""
