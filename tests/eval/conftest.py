"""The tests of evaluation run eagerly: their shapes are many and tiny, compiling each would take minutes."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield
