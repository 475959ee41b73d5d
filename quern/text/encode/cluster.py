"""Encodes units of documents for pool.py on the machines of a Ray cluster, each of which has quern installed.

An encoder whose machine is lost starts on another one, and encodes its units again: equal units, equal ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import numpy as np

from quern.cluster import SECONDS_TO_START, last_line, ray_module
from quern.text.encode.pool import Encoded, Submit, encode_unit
from quern.text.tokenizer import Tokenizer

RESTARTS = 10
"""How often an encoder may be lost."""


class _Encoder:
    """The actor: encodes one unit after the other on one CPU."""

    def __init__(self, tokenizer: Tokenizer, dtype: str) -> None:
        self._tokenizer, self._dtype = tokenizer, np.dtype(dtype)

    def ready(self) -> None:
        """Returns when the actor runs."""

    def encode(self, unit: list[str]) -> Encoded:
        return encode_unit(self._tokenizer, unit, self._dtype)


@contextmanager
def on_cluster(tokenizer: Tokenizer, dtype: np.dtype, workers: int) -> Iterator[Submit]:
    """`pool.StartWorkers` on the cluster that `quern.cluster` has connected.

    Raises:
        RuntimeError: The cluster has no room for the encoders, or encoders were lost too often.
    """
    ray = ray_module()
    kind = ray.remote(_Encoder).options(num_cpus=1, max_restarts=RESTARTS, max_task_retries=RESTARTS)
    encoders = [kind.remote(tokenizer, dtype.str) for _ in range(workers)]
    turns = cycle(encoders)
    try:
        ray.get([encoder.ready.remote() for encoder in encoders], timeout=SECONDS_TO_START)
        yield lambda unit: next(turns).encode.remote(unit).future()
    except ray.exceptions.GetTimeoutError as error:
        raise RuntimeError(
            f"the cluster has had no room for {workers} encoders of one CPU each for {SECONDS_TO_START} s: give fewer "
            "--workers"
        ) from error
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"an encoder of the Ray cluster failed: {last_line(error)}") from error
    finally:
        for encoder in encoders:
            ray.kill(encoder)
