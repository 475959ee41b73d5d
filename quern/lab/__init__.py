"""The lab measures ideas: paired comparisons with verdicts, sweeps, scaling fits, and the experiment log.

Records are JSON lines in a study's folder; tables, figures and pages are made from them. Only the command line imports
this room.
"""
