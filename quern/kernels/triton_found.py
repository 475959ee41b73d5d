"""Whether Triton is installed: torch's builds for CUDA on Linux include it, others do not.

Files named *_triton.py import it at the top, so only the first call imports them.
"""

import importlib.util

TRITON_FOUND = importlib.util.find_spec("triton") is not None
