"""The training loop, one step, checkpoints, signals, and the start and loss of ranks.

The loop knows batches and evaluators by their interface only; stages/ hands them in.
"""
