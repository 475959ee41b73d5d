"""Attention: its definition, the paths that run everywhere, the Triton kernels, and the choice among them.

`attend.py` defines what every path must equal; `autotune.py` measures which one is fastest here.
"""
