"""Waits: they say for whom and until when, and end soon after a signal."""
