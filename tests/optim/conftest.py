"""Tests here count compilations: no stance that an earlier test of the same process left may prevent them."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def compiling() -> Iterator[None]:
    with torch.compiler.set_stance("default"):
        yield
