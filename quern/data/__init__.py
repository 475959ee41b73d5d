"""Token ids → batches. NumPy only, so that both trainers (PyTorch and JAX) share it."""
