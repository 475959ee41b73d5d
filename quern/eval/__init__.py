"""Scores of a model: bits per byte, likelihoods of given answers, generated answers, and how they are summarised.

Evaluators get a model and batches; they choose no data and write no files. Tasks are in tasks/.
"""
