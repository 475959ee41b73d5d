"""Reinforcement learning: questions with rewards (environment.py), rollouts of the model, advantages.

The rollouts are the batches of the one training loop; `Batch.weight` carries the advantages.
"""
