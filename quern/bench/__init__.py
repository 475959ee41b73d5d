"""`quern bench`: speed of each part on this machine, one file per subject, and the records of what was measured.

Only the command line imports this folder.
"""
