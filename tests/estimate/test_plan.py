"""`quern lab plan`: its ranking, refusals and JSON; its model of links against numbers worked out by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quern.cli import main
from quern.estimate.options import NETWORKS, PROCESSORS
from quern.estimate.predict import Cluster
from quern.optim.groups import Rule, dry_run

SMALL = ["--depth", "4", "--train.steps", "100", "--model.heads", "4", "--train.batch-tokens", "65536"]


def planned(tmp_path: Path, *flags: str, code: int = 0) -> dict[str, Any]:
    path = tmp_path / "plan.json"
    assert main.main(["lab", "plan", "gpt", *SMALL, *flags, "--json", str(path)]) == code
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_layout_is_tried_and_the_best_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(tmp_path, "--gpus", "16", "--gpu", "h100", "--network", "ethernet-10g")["candidates"]
    assert sorted((one["dp"], one["tp"]) for one in found) == [(2, 8), (4, 4), (8, 2), (16, 1)]
    seconds = [one["step"]["seconds"] for one in found if one["step"]]
    assert seconds == sorted(seconds) and len(seconds) == 3
    refused = [one for one in found if one["step"] is None]
    assert [one["tp"] for one in refused] == [8] and "use --tp of one of" in refused[0]["refusal"]
    shown = capsys.readouterr().out
    assert "horizon: 100 steps of 65,536 tokens, 6,553,600 in all" in shown
    assert "best: dp" in shown and "what does not fit" in shown and "dp 2 × tp 8: 8 shards cannot share" in shown


def test_of_equally_fast_micro_batches_the_largest_is_advised(tmp_path: Path) -> None:
    (only,) = planned(tmp_path, "--gpus", "1", "--gpu", "h100")["candidates"]
    assert only["micro_batch_tokens"] == 65536 and only["memory"]["peak"] < 70e9


def test_a_layout_that_does_not_fit_is_refused_with_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--gpus", "1", "--gpu", "rtx4090", "--model.width", "16384", "--model.head-dim", "128")
    (only,) = planned(tmp_path, *flags, code=1)["candidates"]
    assert only["step"] is None and "GB of the 22.0 GB" in only["refusal"]
    assert "Nothing fits: use more GPUs (--gpus 2), or a smaller --depth\n" in capsys.readouterr().out
    planned(tmp_path, *flags, "--train.micro-batch-tokens", "4096", code=1)
    assert "a smaller --depth, or --train.micro-batch-tokens 512\n" in capsys.readouterr().out
    planned(tmp_path, "--gpus", "1024", "--model.context", "512", code=1)
    shown = capsys.readouterr().out
    assert "dp 1,024 × tp 1: a batch of 128 rows cannot feed 1,024 replicas: raise --train.b" in shown
    assert "Nothing fits: use fewer --gpus, or a larger --train.batch-tokens" in shown


@pytest.mark.parametrize("setting", ["train.fp8='all'", "train.minutes=5.0", "text.tokenizer='gpt2'"])
def test_what_a_plan_does_not_count_is_refused_in_a_file_too(
    setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "from dataclasses import replace", "from quern.recipes.gpt import RECIPE as GPT"
    part, _, own = setting.partition(".")
    text = f"RECIPE = replace(GPT, name='mine', {part}=replace(GPT.{part}, {own}))"
    (tmp_path / "mine.py").write_text("\n".join([*lines, text]), encoding="utf-8")
    assert main.main(["lab", "plan", str(tmp_path / "mine.py"), "--depth", "2"]) == 1
    told = f"{setting.partition('=')[0]}, which the recipe 'mine' sets, is "
    assert told in capsys.readouterr().err


def test_a_model_that_needs_numbers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "from dataclasses import replace",
        "from quern.model.gpt import GPT",
        "from quern.recipes import gpt",
        "class Curious(GPT):",
        "    def forward(self, tokens_BT, context):",
        "        return super().forward(tokens_BT, context) * float(self.backout_scale.detach())",
        "RECIPE = replace(gpt.RECIPE, make_model=Curious)",
    ]
    (tmp_path / "curious.py").write_text("\n".join(lines), encoding="utf-8")
    assert main.main(["lab", "plan", str(tmp_path / "curious.py"), *SMALL, "--gpus", "1"]) == 1
    assert "the model reads values, which a plan does not have: train it (" in capsys.readouterr().err


def test_what_saves_memory_is_used_where_it_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The GPU has 24 GB: parameters and gradients of 5.5 billion take 22, and activations of 1,536 rows take 31."""
    flags = ("--gpus", "8", "--gpu", "rtx4090", "--per-machine", "8", "--model.width", "12288")
    found = planned(tmp_path, *flags, "--train.batch-tokens", "4096")["candidates"]
    (shared,) = (one for one in found if one["dp"] == 8)
    assert shared["zero"] == 3 and shared["step"] and shared["optimizer_memory"] == "device"
    flags = ("--gpus", "1", "--gpu", "rtx4090", "--model.width", "9216", "--train.batch-tokens", "4096")
    (away,) = planned(tmp_path, *flags)["candidates"]
    assert away["optimizer_memory"] == "cpu"
    assert away["memory"]["masters"] == away["memory"]["moments"] == 0 < away["memory"]["away"]
    rows = ("--model.width", "256", "--train.batch-tokens", "786432", "--train.micro-batch-tokens", "786432")
    (best,) = planned(tmp_path, "--gpus", "1", "--gpu", "rtx4090", *rows)["candidates"]
    assert best["recomputed"] == 3
    assert "--train.recompute 3" in capsys.readouterr().out


def test_a_rule_is_tried_once_for_each_shape_of_its_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again for each micro-batch and each number of blocks that run again: 64 layers took minutes."""
    shapes: list[tuple[int, ...]] = []

    def tried(rule: Rule, masters: Tensor, dtype: torch.dtype) -> Callable[[], None]:
        shapes.append(masters.shape)
        return dry_run(rule, masters, dtype)

    monkeypatch.setattr("quern.estimate.memory.dry_run", tried)
    (only,) = planned(tmp_path, "--gpus", "1", "--gpu", "h100")["candidates"]
    assert only["step"] and shapes and len(shapes) == len(set(shapes))


def test_cost_and_days_follow_from_the_step(tmp_path: Path) -> None:
    flags = ("--train.micro-batch-tokens", "8192", "--dollars-per-hour", "2.5", "--matmul-tflops", "500")
    body = planned(tmp_path, "--gpus", "8", *flags)
    for one in body["candidates"]:
        if one["step"] is None:
            continue
        hours = 100 * one["step"]["seconds"] / 3600
        assert one["days"] == pytest.approx(hours / 24) and one["dollars"] == pytest.approx(hours * 8 * 2.5)
        assert one["mfu"] == pytest.approx(body["flops_per_token"] * 65536 / one["step"]["seconds"] / (8 * 989e12))
        assert one["step"]["products"] == pytest.approx(body["flops_per_token"] * 65536 / 8 / 500e12)


def test_ranks_on_this_machine(tmp_path: Path) -> None:
    body = planned(tmp_path, "--gpus", "2", "--gpu", "cpu", "--dtype", "fp32", "--no-compile")
    assert {(one["dp"], one["tp"]) for one in body["candidates"]} == {(2, 1), (1, 2)}
    assert all(one["step"] is not None for one in body["candidates"])


def test_a_ring_by_hand() -> None:
    """16 H100s in two machines of 8, 400 Gb/s for each; links at 80 % of their rate."""
    infiniband = Cluster(PROCESSORS["h100"], NETWORKS["ib-ndr"], 8)
    ethernet = Cluster(PROCESSORS["h100"], NETWORKS["ethernet-100g"], 8)
    within = infiniband.ring_seconds(8, 1, 36e9, 1, 1)
    assert within == pytest.approx(7 * 3e-6 + 36e9 / (0.8 * 450e9))
    # All eight of a machine share the ring: eight adapters, and two hops between machines.
    assert infiniband.ring_seconds(16, 1, 4e9, 2, 1) == pytest.approx(2 * (14 * 3e-6 + 2 * 5e-6) + 4e9 / (0.8 * 400e9))
    # Shards of 8: each data group has one member in a machine, and its adapter.
    assert infiniband.ring_seconds(2, 8, 4e9, 1, 2) == pytest.approx(2 * 2 * 5e-6 + 4e9 / (0.8 * 50e9))
    # One adapter for the machine, of which the eighth of the groups has an eighth.
    assert ethernet.ring_seconds(2, 8, 4e9, 1, 1) == pytest.approx(2 * 2e-5 + 4e9 / (0.8 * 12.5e9 / 8))
    assert ethernet.ring_seconds(1, 8, 4e9, 1, 1) == 0.0
