"""Execution on several processes: tensor and vocabulary parallelism, sharded optimizer state.

It wraps a model from a table (`plan.py`); the model's own code stays single-device.
"""
