"""A run on disk: its folder, its lock, its saved recipe, what it was made from, and how its model is loaded.

Stages, interop, serving and reports all find a run through this room.
"""
