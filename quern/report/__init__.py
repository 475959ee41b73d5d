"""The report of a run: report.md, report.html and plots, made from the run's JSONL records alone.

Only the command line and `quern run` import it; the lab draws with its plots. It loads no model.
"""
