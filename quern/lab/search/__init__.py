"""The parts of `quern lab sweep` that use Optuna: storage, the queue of trials, results.

`quern/lab/sweep.py` imports these files late, because Optuna is in the extra `lab`.
"""
