"""`quern lab scaling`: an IsoFLOP grid of runs, and the laws that are fitted to it.

The fits take arrays and know nothing of runs; study.py trains the grid and keeps its records.
"""
