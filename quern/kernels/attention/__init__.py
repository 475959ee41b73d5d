"""Attention: its definition, the paths that run everywhere, the Triton kernels, and the choice among them.

`attend.py` has the definition, which every path must equal; `autotune.py` measures which path is the fastest.
"""
