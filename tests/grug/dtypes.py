"""What test_dtype.py asks of JAX's process."""

import jax

from quern.grug.dtype import choose_dtype, is_faster, probe

assert choose_dtype and is_faster


def rates() -> dict[str, list[float]]:
    return probe(jax.devices()[0])
