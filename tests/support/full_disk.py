"""A full disk, for the tests of what a failed write leaves and says, and other limits of this process."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def limited(which: int, most: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


full_disk = partial(limited, resource.RLIMIT_FSIZE)
"""Files may not grow beyond some bytes: a write then fails as on a full disk, with another number."""
