"""A run on disk: its folder, lock, saved recipe, origin, model and public data. Stages, interop and serving use it."""
