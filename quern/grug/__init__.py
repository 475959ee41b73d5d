"""The JAX twin: the `gpt` model, optimizer and loss in JAX with explicit sharding. It imports no torch.

Its stages are in stages/jax/. Laws compare its loss, gradients and updates with those of the PyTorch model.
"""
