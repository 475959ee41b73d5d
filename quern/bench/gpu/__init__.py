"""`quern bench gpu`: the measurements that need a GPU, one file per subject.

Only the command line imports this folder.
"""
