"""Plain functions on tensors: every fast kernel beside the plain one that it must equal.

Nothing here knows of models or processes. The attention kernels are in attention/.
"""
