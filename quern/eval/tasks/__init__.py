"""Evaluation tasks, one file each: which questions are asked and what counts as a right answer.

A task knows its data; how a model is asked and scored is in the folder above.
"""
