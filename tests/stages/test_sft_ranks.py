"""Fine-tuning on two ranks when nothing is downloaded yet: rank 0 fetches and tokenizes, the other rank waits for it.

Real commands over gloo; the data set is on a loopback server.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quern.records import read_events
from quern.train import manifest
from tests.parallel.test_faults import PRETRAIN, SHORT, lines_with
from tests.support.faulty_ranks import FaultyRanks
from tests.support.hub_server import Hub, hub_server, parquet

RECIPE = """
import os
from dataclasses import replace
from quern.mixture import prepare
from quern.recipes.gpt import RECIPE as BASELINE
from quern.text import data_sets

names = ("train.parquet",), ("test.parquet",)
data_sets.DATASETS = {{"gsm8k": data_sets.DataSet("planted", "mill/sums", "", *names, kind="questions")}}
os.environ.update(HF_ENDPOINT="{url}", HF_TOKEN_PATH="none", no_proxy="*")
tokenize = prepare._tokenize

def counted(*arguments):
    print("tokenized", flush=True)
    tokenize(*arguments)

prepare._tokenize = counted

def same(texts, split):
    return texts

RECIPE = replace(BASELINE, name="planted", make_documents=same)  # code of its own, which fine-tuning loads too
"""
PLAIN = "--out out --run cold --no-compile --dtype fp32 --threads 1 --sft.steps 4 --sft.batch-tokens 192".split()
MIXTURE = ("--conversations", "gsm8k,repeats=2")


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub with a small question set."""
    rows = [{"question": f"{n} and {n}?", "answer": f"<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"} for n in range(60)]
    test = [{"question": "7 and 7?", "answer": "#### 14"}]
    with hub_server() as hub:
        hub.sets = {"mill/sums": {"train.parquet": parquet(rows), "test.parquet": parquet(test)}}
        yield hub


def test_one_rank_fetches_and_the_other_waits(faulty_server: FaultyRanks, hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "cold.py"
    path.write_text(RECIPE.format(url=hub.url), encoding="utf-8")
    found = faulty_server(["pretrain", str(path), *PRETRAIN[1:], *SHORT, "--run", "cold"], ranks=1)
    assert found["result"] == 0, found["said"]
    found = faulty_server(["sft", *PLAIN, *MIXTURE])
    assert found["exits"] == [[0, 0]] and found["result"] == 0, found["said"]
    assert sorted(hub.files_asked()) == ["mill/sums/test.parquet", "mill/sums/train.parquet"]
    assert len(lines_with("tokenized", found["said"])) == 1, found["said"]
    stage = faulty_server.folder / "out/runs/cold/sft"
    assert manifest.steps(stage / "checkpoints")
    (data,) = (event for event in read_events(stage) if event["kind"] == "data")
    (source,) = data["sources"]
    # 60 rows, one of them a test row; one is held out
    assert (source["source"], source["conversations"], source["held_out"], source["left_out"]) == ("gsm8k", 116, 1, 1)
