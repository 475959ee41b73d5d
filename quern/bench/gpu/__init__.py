"""`quern bench gpu`: exactness and speed of what only a GPU shows, in sections that fail independently.

Everything also runs at a tiny size on a CPU, so that the suite covers the code. docs/benchmarks/gpu.md shows the last
records.
"""
