"""Encoding on a Ray cluster, here of two workers on this machine: the bytes are those of one process."""

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quern.cli import main
from quern.text.encode.pool import encoded, on_cluster, on_processes, write_shards
from quern.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]


def documents(count: int) -> list[str]:
    rng = random.Random(3)
    words = "mill stone grain flour river köln 世界 😀 baker 17 482 wheel\n\n don't \ud800".split(" ")
    return [" ".join(rng.choices(words, k=rng.randrange(1, 60))) for _ in range(count)]


TEXTS = documents(400)
TOKENIZER = Tokenizer.train(TEXTS, 330)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield
        ray.shutdown()


def encoders_there() -> list[int]:
    """Process ids of Ray's actors that encode."""
    titles = {int(path.parent.name): path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
    return [pid for pid, title in titles.items() if title.startswith(b"ray::_Encoder")]


@pytest.mark.campaign
def test_shards_of_a_cluster_are_those_of_one_process(cluster: None, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "{number} stones of the mill, {"grain " * 900}"}}\n' for number in range(1600)))
    asked = f"prepare --data {text} --text.vocab-size 300 --out {tmp_path}"
    assert main.main([*f"{asked}/plain --workers 1".split()]) == 0
    assert main.main([*f"{asked}/ray --engine ray".split()]) == 0
    plain, ours = files(tmp_path / "plain" / "data"), files(tmp_path / "ray" / "data")
    assert plain.keys() == ours.keys() and len(plain) >= 5
    assert all(plain[name] == ours[name] for name in plain if not name.endswith("digests.json"))
    for start_workers in (on_processes, on_cluster):
        folder = tmp_path / start_workers.__name__
        how = {"workers": 2, "shard_tokens": 211, "unit_characters": 700, "start_workers": start_workers}
        write_shards(iter(TEXTS), TOKENIZER, folder, "train", "mark", print, **how)
    assert files(tmp_path / "on_processes") == files(tmp_path / "on_cluster")


@pytest.mark.campaign
@pytest.mark.skipif(sys.platform != "linux", reason="looks for the encoders in /proc")
def test_units_of_a_lost_encoder_are_encoded_again(cluster: None) -> None:
    how = (TOKENIZER, np.dtype("<u2"))
    expected = [unit.ids.tolist() for unit in encoded(TEXTS, *how, unit_characters=700)]
    units = encoded(TEXTS, *how, 2, 700, on_cluster)
    found = [next(units).ids.tolist()]
    os.kill(encoders_there()[0], signal.SIGKILL)
    found += [unit.ids.tolist() for unit in units]
    assert found == expected


def test_a_missing_ray_is_named_with_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main.main([*f"prepare --engine ray --out {tmp_path}".split()]) != 0
    assert "a Ray cluster needs an extra package" in (said := capsys.readouterr().err) and "'.[ray]'" in said
    assert list(tmp_path.iterdir()) == []
