"""The tests of evaluation run eagerly: their shapes are many and tiny, compiling each would take minutes."""

from collections.abc import Iterator

import pytest

from quern import compiler


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with compiler.eager():
        yield
