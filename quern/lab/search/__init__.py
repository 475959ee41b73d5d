"""`quern lab sweep`: a search over recipe fields with Optuna, which survives kills and can use several workers.

space.py and results.py load without Optuna, which is in the extra `lab`; sweep.py is imported late.
"""
