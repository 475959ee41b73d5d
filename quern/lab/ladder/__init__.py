"""The ladder: ideas against a baseline at several sizes, on its compute-optimal line, as compute multipliers."""
