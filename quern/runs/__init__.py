"""A run on disk: its folder, lock, saved recipe, origin and model, and the public data that it reads. Stages, interop and
serving use it."""
