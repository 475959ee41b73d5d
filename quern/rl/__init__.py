"""Reinforcement learning: questions with rewards (environments/), rollouts of the model, advantages.

Layer 4. The rollouts are the batches of the one training loop; `Batch.weight` carries the advantages.
"""
