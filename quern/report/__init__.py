"""The report of a run: report.md, report.html and plots, made from the run's JSONL records alone.

A leaf: only the command line and `quern run` import it. It loads no model.
"""
