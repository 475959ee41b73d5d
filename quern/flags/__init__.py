"""Command-line flags from dataclasses and recipes, and recipe files, with a one-line error for each mistake.

tyro converts the values and prints the help. The verbs' options are in cli/.
"""
