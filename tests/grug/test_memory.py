"""Large freed blocks are used again, in every thread; measured by the kernel's count of page faults."""

import subprocess
import sys

import pytest

from tests.support.line_server import ROOT

CODE = """
import ctypes, resource, sys, threading
from quern.grug.mesh import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]

def fill():
    block = libc.malloc(1 << 26)
    libc.memset(block, 1, 1 << 26)
    libc.free(block)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""
PAGES = 2**26 // 4096


def faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CODE, how], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has these settings")
def test_a_freed_block_costs_no_pages_the_second_time() -> None:
    if faults("by default") < PAGES / 2:
        pytest.skip("this system hands out huge pages, or keeps memory by itself")
    assert faults("kept") < PAGES / 100
