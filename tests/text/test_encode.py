"""Encoding on several processes: small texts stay in this process, errors end the workers and are reported."""

import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.data.shards import Corpus
from quern.text.encode.pool import FEW_UNITS, encoded, write_shards
from quern.text.tokenizer import Tokenizer

TEXTS = [f"{number} stones of the mill" for number in range(200)]
TOKENIZER = Tokenizer.train(TEXTS, 300)
SMALL_UNITS = 100  # characters: five documents


def children() -> list[int]:
    """Process ids of the children of this process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            command = path.with_name("cmdline").read_bytes()
        except (OSError, ValueError):
            continue  # the process has ended
        if parent == os.getpid() and b"resource_tracker" not in command:  # of Python, which stays
            found.append(int(path.parent.name))
    return found


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for the workers in /proc")


@linux
def test_a_text_of_few_units_starts_no_process() -> None:
    before = children()
    for count, started in ((FEW_UNITS - 1, 0), (FEW_UNITS, 3)):
        units = encoded(TEXTS[: 5 * count], TOKENIZER, np.dtype("<u2"), 3, SMALL_UNITS)
        first = next(units)
        assert first.ids[: first.lengths[0]].tolist() == [TOKENIZER.bos, *TOKENIZER.encode(TEXTS[0])]
        assert first.lengths.size == 5 and first.text_bytes == sum(map(len, TEXTS[:5]))
        assert len(set(children()) - set(before)) == started
        units.close()
        assert children() == before


@linux
def test_a_worker_that_is_killed_is_reported_and_the_others_end() -> None:
    before = children()
    # Without an end: the other worker could finish a short text before the loss is noticed, and nothing would be wrong.
    units = encoded(cycle(TEXTS), TOKENIZER, np.dtype("<u2"), 2, SMALL_UNITS)
    next(units)
    os.kill((set(children()) - set(before)).pop(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="a process that encodes text ended early"):
        deque(units, maxlen=0)
    assert children() == before


def broken(texts: list[str]) -> Iterator[str]:
    yield from texts
    raise ValueError("file 3, line 7: not a line of JSON")


@linux
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_the_text_is_raised_and_finished_shards_are_continued(workers: int, tmp_path: Path) -> None:
    before, said = children(), list[str]()
    how: dict[str, Any] = {"workers": workers, "shard_tokens": 500, "unit_characters": SMALL_UNITS}
    with pytest.raises(ValueError, match="file 3, line 7"):
        write_shards(broken(TEXTS[:150]), TOKENIZER, tmp_path, "train", "mark", said.append, **how)
    assert children() == before and said == []
    write_shards(iter(TEXTS), TOKENIZER, tmp_path, "train", "mark", said.append, **how)
    assert said[0].startswith("tokens: train continues after ") and len(said) == 2
    corpus = Corpus.open(tmp_path, "train", fingerprint="mark")
    assert [TOKENIZER.decode(corpus.gather(i)[1:].tolist()) for i in range(corpus.num_documents)] == TEXTS
