"""The process: its waits, which say for whom and until when, its end soon after a signal, and its memory."""
