"""Execution on several processes: tensor and vocabulary parallelism, sharded optimizer state, memory and traffic.

It wraps a model from a table (`plan.py`); the model's own code stays single-device.
"""
