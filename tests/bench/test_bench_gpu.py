"""`quern bench gpu` without a GPU: every section runs at tiny sizes, fails alone, and is recorded."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from quern.bench.gpu import command
from quern.bench.gpu.command import AIMS, UNMEASURED, page, verdict
from quern.bench.gpu.kernels import bytes_of_a_step, flex, pairs, worst_error
from quern.bench.gpu.train import GpuBench, Limits, data_sheet, kind_of_kernel, measure_limits, recipe_of
from quern.bench.measure import Figure, figure
from quern.bench.options import GpuOptions, Section
from quern.flags.check_flags import read
from quern.kernels.attention.attend import MaskSpec, attend_plain, visible
from quern.machine import Machine
from tests.support.deviation import random
from tests.support.toy_training import CPU

ROOT = Path(__file__).parents[2]
QUICK = ["--quick", "--no-compile", "--threads", "1"]


def a_bench() -> GpuBench:
    return GpuBench(CPU, 0, True, 2, limits=Limits(1e12, 1e9, None))


def measured(out: Path, *arguments: str) -> tuple[int, list[str]]:
    """The exit code of `quern bench gpu`, and what it printed."""
    said: list[str] = []
    options = read(GpuOptions, [*arguments, "--out", str(out)], prog="quern bench gpu")
    return command.run(options, said.append), said


def body_of(out: Path) -> dict:
    return json.loads((out / "bench" / "gpu.json").read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "mask", [MaskSpec(20), MaskSpec(None, (torch.arange(140, dtype=torch.int32) // 30).expand(2, -1))]
)
def test_flex_attention_is_compared_on_the_same_mask(mask: MaskSpec) -> None:
    """Forward: it has no backward pass on a CPU."""
    q, k, v = (random(2, 140, heads, 16, seed=heads) for heads in (4, 2, 2))
    with torch.no_grad():
        y = flex(a_bench()).attend(q, k, v, mask, 0.3)
    assert (y - attend_plain(q, k, v, mask, 0.3)).abs().max() <= 1e-5


def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, said = measured(tmp_path)
    assert code == 1
    assert len(said) == 1 and "there is no GPU here" in said[0] and "--quick" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_every_section_runs_and_is_recorded(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    lines = (json.dumps({"text": f"The miller grinds grain number {i}, ça va? " * 3}) for i in range(60))
    text.write_text("\n".join(lines), encoding="utf-8")
    assert measured(tmp_path, *QUICK, "--data", str(text))[0] == 0
    body = body_of(tmp_path)
    assert list(body["sections"]) == list(command.SECTIONS) == list(get_args(Section))
    for name, section in body["sections"].items():
        assert section["error"] is None and section["problems"] == [], (name, section)
        assert section["measures"]
        for measure in section["measures"]:
            assert all(math.isfinite(value) and value >= 0 for value in measure["values"]), measure
    found = {(s, m["name"]): m["median"] for s, part in body["sections"].items() for m in part["measures"]}
    assert found["exactness", "blocked, float32, head dim 16: error"] < 1e-5
    assert found["loss", "loss, TanhCap(limit=15.0): error"] < 2e-2
    assert found["training", "graphs: compiled after the fourth step"] == 0
    assert next(m["median"] for m in body["sections"]["real"]["measures"] if m["unit"] == "bits/byte") < 9.5
    shares = [value for (section, name), value in found.items() if section == "training" and name.startswith("time: ")]
    assert 95 < sum(shares) < 400  # profiling slows tiny steps down
    written = (tmp_path / "bench" / "gpu.md").read_text(encoding="utf-8")
    assert written == page(body) and "figures mean nothing" in written
    assert all(f"## {name}\n" in written for name in body["sections"])


def test_a_section_that_fails_or_runs_out_of_time_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(bench: GpuBench) -> Iterator[Figure]:
        yield figure("before: it", "s", 1.0)
        raise RuntimeError("no kernel image\nis available")

    def runs_out(bench: GpuBench) -> Iterator[Figure]:
        yield figure("in: time", "s", 2.0)
        time.sleep(max(0.0, bench.deadline - time.monotonic()))
        bench.seconds({"too late": list})

    def goes_on(bench: GpuBench) -> Iterator[Figure]:
        bench.seconds({"a path": lambda: [][1]})
        yield figure("after: all", "s", 3.0)

    sections = {"a": (fails, 5), "b": (runs_out, 0.01), "c": (goes_on, 5)}
    monkeypatch.setattr(command, "SECTIONS", sections)
    options = GpuOptions(sections=("a", "b", "c"), quick=True, compile=False, threads=1, out=tmp_path)  # pyright: ignore
    assert command.run(options, lambda line: None) == 0
    a, b, c = body_of(tmp_path)["sections"].values()
    assert [part["measures"][0]["median"] for part in (a, b, c)] == [1.0, 2.0, 3.0]
    assert a["error"] == "RuntimeError: no kernel image" and "raise RuntimeError" in a["traceback"]
    assert b["error"].startswith("out of time")
    assert c["error"] is None and c["problems"] == ["a path: IndexError: list index out of range"]
    written = (tmp_path / "bench" / "gpu.md").read_text(encoding="utf-8")
    assert "- RuntimeError: no kernel image" in written and "- a path: IndexError" in written


def test_sections_without_time_are_named(tmp_path: Path) -> None:
    assert measured(tmp_path, *QUICK, "--sections", "rope", "muon", "--minutes", "1e-9")[0] == 0
    sections = body_of(tmp_path)["sections"]
    assert list(sections) == ["rope", "muon"]
    assert all(part["error"].startswith("out of time") and not part["measures"] for part in sections.values())


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
    bench, x = a_bench(), torch.ones(2, requires_grad=True)
    taken = bench.passes({"a": lambda: Slow.apply(x), "broken": lambda: [][1]}, [x], torch.ones(2))
    assert list(taken) == ["a forward", "a backward"]
    assert all(one >= 0.1 for one in taken["a forward"]) and all(one < 0.1 for one in taken["a backward"])
    assert bench.problems[-1] == "broken: IndexError: list index out of range"


def test_the_error_is_the_worst_of_output_and_gradients() -> None:
    x, grad = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert worst_error(lambda x: 2 * x, lambda x: 2 * x, [x], grad) == 0
    # The value is right, the gradient is 3 instead of 2.
    wrong = lambda x: 3 * x - x.detach()  # noqa: E731
    assert worst_error(wrong, lambda x: 2 * x, [x], grad) == pytest.approx(0.5)
    assert worst_error(lambda x: 2 * x + 1, lambda x: 2 * x, [x], grad) == pytest.approx(2**0.5 / 10)
    assert worst_error(lambda x: x / 0, lambda x: 2 * x, [x], grad) == math.inf


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_pairs_are_counted_as_the_mask_shows_them(window: int | None) -> None:
    ids = torch.tensor([[0] * 5 + [1] * 11 + [2] * 4, [0] * 20], dtype=torch.int32)
    for mask in (MaskSpec(window), MaskSpec(window, ids)):
        seen = visible(20, mask, torch.device("cpu")).float()
        by_hand = seen.sum() / (2 if mask.documents_BT is not None else 1)
        assert pairs(mask, 20) == by_hand.item()


def test_limits_are_measured_and_data_sheets_known() -> None:
    limits = measure_limits(CPU, quick=True)
    assert 1e8 < limits.flops < 1e14 and 1e8 < limits.bytes_per_second < 1e12 and limits.sheet is None

    class Named(Machine):
        def describe(self) -> dict[str, object]:
            return {"processor": "NVIDIA H100 PCIe"}

    assert data_sheet(Named(torch.device("cpu"), torch.bfloat16, False, 1)) == 756e12
    assert data_sheet(CPU) is None


def test_a_decoding_step_reads_weights_once_and_what_each_row_sees() -> None:
    from quern.generate.cache import KVCache
    from quern.train.state import build_model

    recipe = recipe_of(a_bench())
    model = build_model(recipe, CPU, 0)
    cache = KVCache(model, 3, 64)
    multiplied = sum(p.numel() for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2)
    head = 512 * 32
    gates = sum(p.numel() for name, p in model.named_parameters() if "value_gate" in name)
    keys_and_values = 3 * 2 * (16 + 20) * 2 * 16  # a window of 16 and a long layer with 20 tokens; 2 heads of 16
    assert bytes_of_a_step(recipe, cache, 3, 20) == 4 * (multiplied - gates + head + keys_and_values)


def test_kernels_are_told_apart_by_their_names() -> None:
    kinds = {
        "key_gradients_kernel": "attention",
        "norm_gradient_kernel": "rotation",
        "sm90_xmma_gemm_e4m3bf16": "matrix products",
        "Memcpy DtoD (Device -> Device)": "copies",
        "triton_poi_fused_mul_add_3": "elementwise",
    }
    assert {name: kind_of_kernel(name) for name in kinds} == kinds


def test_aims_are_met_or_missed_or_not_yet_measured() -> None:
    empty = page({})
    assert empty.count(UNMEASURED) == len(AIMS) and "≥ 400 TFLOP/s" in empty and "≤ 34 GB" in empty
    least, most = ([verdict(value, sign, 34) for value in (33, 34, 35)] for sign in ("≥", "≤"))
    assert least == ["missed", "met", "met"] and most == ["met", "met", "missed"]
    section = {"measures": [figure("memory: at most", "GB", 35.0)], "problems": [], "error": None}
    body = {key: {"processor": "x", "dtype": "x", "attention": "x", "torch": "x", "quern": "x", "git": "x"}
            for key in ("machine", "versions")}  # fmt: skip
    body |= {"utc": "", "seconds": 1.0, "quick": False, "notes": [], "sections": {"training": section}}
    assert "| ≤ 34 GB | 35.00 GB | missed |" in page(body) and page(body).count(UNMEASURED) == len(AIMS) - 1


def test_the_page_in_the_documentation_is_that_of_the_record_there() -> None:
    folder = ROOT / "docs" / "benchmarks"
    path = folder / "records" / "gpu.json"
    body = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    assert (folder / "gpu.md").read_text(encoding="utf-8") == page(body)
