"""Command-line flags from dataclasses and recipes, and recipe files, with a one-line error for each mistake.

The options of the verbs are in cli/.
"""
