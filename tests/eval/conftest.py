import pytest


@pytest.fixture(autouse=True)
def all_eager(eager: None) -> None:
    """The shapes of evaluation are many and tiny: compiling each would take minutes."""
