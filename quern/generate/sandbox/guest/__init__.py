"""The side of the sandbox that runs inside: the standard library only, and nothing of quern.

`zygote.py` starts first, before any confinement of its own, and never reads a program. For each order it forks two
processes, `program.py` and `checker.py`, and `confine.py` confines both before they read their texts.
"""
