"""The benchmarks of kernels and what `gpu` stands for, at tiny sizes and without a GPU: they fail alone."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.bench import command
from quern.bench import kernels as benchmarks
from quern.bench.generate import bytes_of_a_step
from quern.bench.kernels import attention, attention_seconds, cross_entropy, exactness, flex, pairs, worst_error
from quern.bench.material import SIZES, reference
from quern.bench.measure import Figure, Setup, figure, versions
from quern.bench.options import BenchOptions
from quern.bench.train import data_sheet, slowest_kernels
from quern.generate.cache import KVCache
from quern.kernels import cross_entropy as kernels
from quern.kernels.attention.attend import MaskSpec, attend_plain, visible
from quern.kernels.attention.autotune import BLOCKED, PLAIN, SDPA, Backend, Picked
from quern.machine import Machine
from quern.train.state import build_model
from tests.support.deviation import random
from tests.support.toy_training import CPU


def a_setup() -> Setup:
    return Setup(machine=CPU, quick=True, rounds=2, log=lambda line: None)


def measured(out: Path, *what: Any) -> tuple[int, dict[str, Any]]:
    """The exit code of `quern bench`, and its records by name."""
    options = BenchOptions(what=what, quick=True, rounds=1, start=False, compile=False, threads=1, out=out)
    code = command.run(options, print)
    quick = (out / "bench").glob("*.quick*.json")
    return code, {path.stem.replace(".quick", ""): json.loads(path.read_text(encoding="utf-8")) for path in quick}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", [MaskSpec(20), MaskSpec(None, (torch.arange(140).int() // 30).expand(2, -1))])
def test_flex_attention_is_compared_on_the_same_mask(mask: MaskSpec) -> None:
    """Forward: it has no backward pass on a CPU."""
    q, k, v = (random(2, 140, heads, 16, seed=heads) for heads in (4, 2, 2))
    with torch.no_grad():
        y = flex(a_setup()).attend(q, k, v, mask, 0.3)
    assert (y - attend_plain(q, k, v, mask, 0.3)).abs().max() <= 1e-5


def test_the_blocks_of_flex_attention_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a GPU their sort becomes 94,000 lines, at which the assembler worked for more than 90 seconds."""
    compiled: list[str] = []
    monkeypatch.setattr(Setup, "compiled", lambda _, function: compiled.append(function.__name__))
    flex(a_setup())
    assert compiled == ["flex_attention"]


def test_all_that_gpu_stands_for_runs(tmp_path: Path) -> None:
    code, found = measured(tmp_path, "gpu")
    assert code == 0 and found.keys() == set(command.GPU)
    for name, body in found.items():
        assert body["measures"] and "failures" not in body["settings"], name
        for measure in body["measures"]:
            assert all(math.isfinite(value) and value >= 0 for value in measure["values"]), measure
    medians = {(name, m["name"]): m["median"] for name, body in found.items() for m in body["measures"]}
    assert all(medians["exactness", f"{path}, float32, head dim 16: error"] < 1e-5 for path in ("blocked", "sdpa"))
    assert medians["cross-entropy", "chunked, TanhCap(limit=15.0): error"] < 2e-2
    for name in ("train", "fp8"):
        first = float(next(m["note"] for m in found[name]["measures"] if m["name"] == "loss of a batch").split()[-4])
        assert medians[name, "loss of a batch"] < first, "both learn"
    assert "12 layers at dynamic scales" in found["fp8"]["settings"]["computed"]
    assert "computed" not in found["train"]["settings"]
    assert 0 < medians["decode", "batch 1, eager, greedy: of the bandwidth"] < 100


def test_a_benchmark_that_fails_or_runs_out_of_time_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(setup: Setup) -> Iterator[Figure]:
        yield figure("before it", "s", 1.0)
        raise RuntimeError("no kernel image\nis available")

    def is_stopped(setup: Setup) -> Iterator[Figure]:
        yield figure("before it", "s", 2.0)
        raise KeyboardInterrupt

    def goes_on(setup: Setup) -> Iterator[Figure]:
        yield figure("all", "s", 3.0)

    def looks(setup: Setup) -> Iterator[Figure]:
        yield figure("one", "s", 1.0)
        body = json.loads((tmp_path / "bench" / "muon.quick.part.json").read_text(encoding="utf-8"))
        assert [one["name"] for one in body["measures"]] == ["one"], "a killed process would lose it"
        yield figure("two", "s", 2.0)

    monkeypatch.setattr(command, "BENCHMARKS", {"rope": fails, "muon": goes_on, "fp8": is_stopped, "encode": fails})
    code, found = measured(tmp_path, "rope", "muon")
    assert code == 1 and [body["measures"][0]["median"] for body in (found["rope.part"], found["muon"])] == [1.0, 3.0]
    assert "raise RuntimeError" in found["rope.part"]["settings"]["failures"]["rope"]
    record = tmp_path / "bench" / "rope.quick.part.json"
    assert f", ended by RuntimeError, record: {record}\n" in capsys.readouterr().out
    assert "failures" not in found["muon"]["settings"]
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, "fp8", "muon")
    body = json.loads((tmp_path / "bench" / "fp8.quick.part.json").read_text(encoding="utf-8"))
    assert body["measures"][0]["median"] == 2.0
    with pytest.raises(RuntimeError, match="no kernel image"):
        measured(tmp_path, "encode")
    monkeypatch.setattr(command, "BENCHMARKS", {"rope": lambda setup: [][1], "muon": looks})
    (tmp_path / "bench" / "rope.quick.json").write_text("{}", encoding="utf-8")
    found = measured(tmp_path, "rope", "muon")[1]
    assert found["rope"] == {} and found["rope.part"]["measures"] == [], "an earlier record stays, also a damaged one"
    assert len(found["muon"]["measures"]) == 2 and "failures" not in found["muon"]["settings"]
    monkeypatch.setattr(command, "BENCHMARKS", {"muon": goes_on})
    (tmp_path / "bench" / "muon.json").write_text("{}", encoding="utf-8")
    found = measured(tmp_path, "muon")[1]
    assert (tmp_path / "bench" / "muon.json").read_text(encoding="utf-8") == "{}", "no record of --quick"
    assert len(found["muon"]["measures"]) == 1 and "muon.part" not in found, "it has fewer figures, and all of them"


def test_a_path_that_fails_stops_no_other() -> None:
    said: list[str] = []
    setup = replace(a_setup(), log=said.append)
    broken = Backend("broken", lambda *arguments: [][1])
    taken = attention_seconds(setup, {"a": (MaskSpec(), broken), "b": (MaskSpec(), PLAIN)}, (1, 8, 2, 4))
    assert list(taken) == ["b forward", "b backward"]
    assert list(setup.seconds({"c": lambda: [][1], "d": lambda: 1})) == ["d"] and setup.settings["failures"].pop("c")
    assert said.pop() == "  ! c: IndexError: list index out of range"
    assert said == ["  ! a: IndexError: list index out of range"] and list(setup.settings["failures"]) == ["a"]


def test_the_errors_of_one_dtype_and_head_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that reads hidden keys is asked for several tokens only: cuDNN takes no single one."""

    def several(q: torch.Tensor, *rest: Any, **how: Any) -> torch.Tensor:
        assert q.size(1) > 1
        return attend_plain(q, *rest, **how)

    monkeypatch.setattr(benchmarks, "grid", lambda setup: [(T, 1, MaskSpec()) for T in (1, 3)])
    monkeypatch.setattr(benchmarks, "paths", lambda setup: [Backend("several", several)])
    setup = Setup(machine=CPU, what=("exactness",), only="float16-128", log=lambda line: None)
    names = [one["name"] for one in exactness(setup)]
    assert names == [f"{path}, float16, head dim 128: error" for path in ("several", "definition")]


def test_a_package_that_is_missing_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quern.bench.measure.PACKAGES", ("numpy", "not_installed"))
    assert "numpy" in versions() and "not_installed" not in versions()


class OnGpu(Setup):
    on_gpu = True  # type: ignore[assignment]


def test_on_a_gpu_the_picked_path_is_compared_and_no_name_stands_twice() -> None:
    """With tiny sizes, and kernels that a CPU has."""
    chosen = Picked({"full": SDPA, "window": BLOCKED, "growing": BLOCKED, "documents": SDPA})
    setup = OnGpu(machine=replace(CPU, attention=chosen), quick=True, rounds=1, log=lambda line: None)
    units = [(one["name"], one["unit"]) for one in attention(setup)]
    names = [name for name, _ in units]
    assert len(set(names)) == len(names) and ("T=64, full: sdpa forward: rate", "TFLOP/s") in units
    assert {"T=64, window 16: blocked forward", "T=64: full / window 16, as picked"} <= set(names)
    assert not any("documents: blocked" in name for name in names)


class Slow(torch.autograd.Function):
    """Doubles x; the forward pass takes 0.1 s."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * grads[0]


def test_the_backward_pass_is_timed_without_the_forward_pass() -> None:
    x = torch.ones(2, requires_grad=True)
    taken = a_setup().passes({"a": lambda: Slow.apply(x)}, [x], torch.ones(2))
    assert all(one >= 0.1 for one in taken["a forward"]) and all(one < 0.1 for one in taken["a backward"])


def test_the_error_is_the_worst_of_output_and_gradients() -> None:
    x, grad = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert worst_error(lambda x: 2 * x, lambda x: 2 * x, [x], grad) == 0
    # The value is right, the gradient is 3 instead of 2.
    wrong = lambda x: 3 * x - x.detach()  # noqa: E731
    assert worst_error(wrong, lambda x: 2 * x, [x], grad) == pytest.approx(0.5)
    assert worst_error(lambda x: 2 * x + 1, lambda x: 2 * x, [x], grad) == pytest.approx(2**0.5 / 10)
    assert worst_error(lambda x: x / 0, lambda x: 2 * x, [x], grad) == math.inf


def test_a_wrong_gradient_of_the_loss_is_seen_at_the_size_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and width are a GPU's, which makes gradients small; the vocabulary is smaller."""
    right = kernels.cross_entropy
    wrong = lambda x, *rest: right(1.5 * x - 0.5 * x.detach(), *rest)  # noqa: E731 — the same loss
    monkeypatch.setitem(SIZES, "quick", replace(SIZES["quick"], loss=(*SIZES["cuda"].loss[:2], 512)))
    errors = []
    for loss in (right, wrong):
        monkeypatch.setattr(kernels, "cross_entropy", loss)
        errors.append(next(cross_entropy(a_setup()))["median"])
    assert errors[0] < 2e-2 and errors[1] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_pairs_are_counted_as_the_mask_shows_them(window: int | None) -> None:
    ids = torch.tensor([[0] * 5 + [1] * 11 + [2] * 4, [0] * 20], dtype=torch.int32)
    for mask in (MaskSpec(window), MaskSpec(window, ids)):
        seen = visible(20, mask, torch.device("cpu")).float()
        by_hand = seen.sum() / (2 if mask.documents_BT is not None else 1)
        assert pairs(mask, 20) == by_hand.item()


def test_the_peak_of_a_known_device_is_its_data_sheets() -> None:
    class Named(Machine):
        def describe(self) -> dict[str, object]:
            return {"processor": "NVIDIA GeForce RTX 4090"}

    assert data_sheet(Named(torch.device("cpu"), torch.bfloat16, False, 1)) == 165e12
    assert data_sheet(Named(torch.device("cpu"), torch.float32, False, 1)) is None is data_sheet(CPU)


def test_shares_of_a_step_are_of_its_usual_time() -> None:
    a = torch.randn(200, 200)
    seconds = time.perf_counter()
    step = lambda: [a @ a for _ in range(50)]  # noqa: E731
    step()
    found = slowest_kernels(step, False, 10 * (time.perf_counter() - seconds))
    idle, kind, *_ = figures = list(found)
    first = next(one for one in figures if one["name"].startswith("kernel"))
    assert kind["name"] == "time: matrix products" and kind["median"] >= first["median"]
    assert idle["name"] == "idle" and first["name"] == "kernel aten::mm" and 0 < first["median"] < 100
    assert idle["median"] <= 100 - first["median"]


def test_a_decoding_step_reads_weights_once_and_what_each_row_sees() -> None:
    recipe = reference(quick=True, seed=0)
    recipe = replace(recipe, model=replace(recipe.model, windows="SL"))
    model = build_model(recipe, CPU, 0)
    cache = KVCache(model, 3, 64)
    multiplied = sum(p.numel() for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2)
    head = 512 * 32
    gates = sum(p.numel() for name, p in model.named_parameters() if "value_gate" in name)
    keys_and_values = 3 * 2 * (16 + 20) * 2 * 16  # a window of 16 and a long layer with 20 tokens; 2 heads of 16
    assert bytes_of_a_step(recipe, cache, 3, 20) == 4 * (multiplied - gates + head + keys_and_values)
