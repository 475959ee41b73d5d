"""A run on disk: its folder, lock, saved recipe, origin, and model. Stages, interop and serving use it."""
