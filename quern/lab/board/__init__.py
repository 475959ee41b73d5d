"""`quern lab board`: a local page over the records of runs and studies.

It reads files, renames and removes runs, and needs no extra.
"""
