"""Functions on tensors: each fast kernel with the plain twin that it must equal.

They know no models and no processes. The attention kernels are in attention/.
"""
