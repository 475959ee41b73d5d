"""Command-line flags of dataclasses: which ones a recipe offers, and a one-line error for each wrong one.

tyro converts and prints the help. This room knows recipes and no verbs; the verbs' options are in cli/.
"""
