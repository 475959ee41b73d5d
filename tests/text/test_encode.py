"""Encoding on several processes: small texts stay in this process, errors end the workers and are reported."""

import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from itertools import cycle
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.data.shards import Corpus
from quern.stages.encode import FEW_UNITS, encoded, on_cluster, on_processes, write_shards
from quern.text.tokenizer import Tokenizer
from tests.support.command import Told
from tests.support.folder import contents
from tests.support.memory_corpus import texts_of

TEXTS = [f"{number} stones of the mill" for number in range(200)]
TOKENIZER = Tokenizer.train(TEXTS, 300)
SMALL_UNITS = 100  # characters: five documents


def children() -> set[int]:
    return {pid for process in active_children() if (pid := process.pid)}


def test_a_text_of_few_units_starts_no_process() -> None:
    before = children()
    for count, started in ((FEW_UNITS - 1, 0), (FEW_UNITS, 3)):
        units = encoded(TEXTS[: 5 * count], TOKENIZER, np.dtype("<u2"), 3, SMALL_UNITS)
        first = next(units)
        assert first.ids[: first.lengths[0]].tolist() == [TOKENIZER.bos, *TOKENIZER.encode(TEXTS[0])]
        assert first.lengths.size == 5 and first.text_bytes == sum(map(len, TEXTS[:5]))
        assert len(children() - before) == started
        units.close()
        assert children() == before


def test_a_worker_that_is_killed_is_reported_and_the_others_end() -> None:
    before = children()
    # Without an end: the other worker could finish a short text before the loss is noticed, and nothing would be wrong.
    units = encoded(cycle(TEXTS), TOKENIZER, np.dtype("<u2"), 2, SMALL_UNITS)
    next(units)
    os.kill((children() - before).pop(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="an encoding process ended early"):
        deque(units, maxlen=0)
    assert children() == before


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_the_text_is_raised_and_finished_shards_are_continued(workers: int, tmp_path: Path) -> None:
    before, said = children(), list[str]()

    def broken() -> Iterator[str]:
        yield from TEXTS[:150]
        raise ValueError("file 3, line 7: not a line of JSON")

    how: dict[str, Any] = {"workers": workers, "shard_tokens": 500, "unit_characters": SMALL_UNITS}
    with pytest.raises(ValueError, match="file 3, line 7"):
        write_shards(broken(), TOKENIZER, tmp_path, "train", "mark", said.append, **how)
    assert children() == before and said == []
    write_shards(iter(TEXTS), TOKENIZER, tmp_path, "train", "mark", said.append, **how)
    assert said[0].startswith("tokens: train continues after ") and len(said) == 2
    assert texts_of(Corpus.open(tmp_path, "train", fingerprint="mark"), TOKENIZER) == TEXTS


# On a Ray cluster of two workers on this machine --------------------------------------------------------------------


@pytest.mark.campaign
def test_shards_of_a_cluster_are_those_of_one_process(cluster: None, told: Told, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "{number} stones of the mill, {"grain " * 900}"}}\n' for number in range(1600)))
    asked = f"prepare --data {text} --text.vocab-size 300 --out {tmp_path}"
    for flags in ("/plain --workers 1", "/ray --engine ray"):
        told(*f"{asked}{flags}".split())
    plain, ours = contents(tmp_path / "plain" / "data"), contents(tmp_path / "ray" / "data")
    assert plain.keys() == ours.keys() and len(plain) >= 5
    assert all(plain[name] == ours[name] for name in plain if not name.endswith("digests.json"))
    for start_workers in (on_processes, on_cluster):
        folder = tmp_path / start_workers.__name__
        how = {"workers": 2, "shard_tokens": 211, "unit_characters": SMALL_UNITS, "start_workers": start_workers}
        write_shards(iter(TEXTS), TOKENIZER, folder, "train", "mark", print, **how)
    assert contents(tmp_path / "on_processes") == contents(tmp_path / "on_cluster")


@pytest.mark.campaign
@pytest.mark.skipif(sys.platform != "linux", reason="looks for the encoders in /proc")
def test_units_of_a_lost_encoder_are_encoded_again(cluster: None) -> None:
    how = (TOKENIZER, np.dtype("<u2"))
    expected = [unit.ids.tolist() for unit in encoded(TEXTS, *how, unit_characters=SMALL_UNITS)]
    units = encoded(TEXTS, *how, 2, SMALL_UNITS, on_cluster)
    found = [next(units).ids.tolist()]
    titles = {int(path.parent.name): path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
    os.kill(next(pid for pid, title in titles.items() if title.startswith(b"ray::_Encoder")), signal.SIGKILL)
    assert found + [unit.ids.tolist() for unit in units] == expected


def test_a_missing_ray_is_named_with_its_extra(told: Told, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = told("prepare", "--engine", "ray", "--out", tmp_path, code=1)
    assert "a Ray cluster needs an extra package" in said and "'.[ray]'" in said
    assert list(tmp_path.iterdir()) == []
