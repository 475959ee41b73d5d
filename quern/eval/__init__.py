"""Scores of a model: bits per byte, likelihoods of given answers, generated answers, and tasks that ask for them.

Evaluators take a model and batches or items; they choose no data, and write answers where `Records` says. The built-in
task is in task.py.
"""
