"""The benchmarks: their counts, order of jobs, records and refusals, but no speed."""

import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.bench import command
from quern.bench.generate import talking_engine
from quern.bench.load import Reply
from quern.bench.material import left_to_itself, random_batch, reference
from quern.bench.measure import Setup, alternate, number
from quern.bench.options import BenchOptions
from quern.bench.serve import NAME, QUESTION, TURN_REPLY, rate, second_turns
from quern.flags.check_flags import read
from quern.generate.sampling import Sampling
from quern.model.context import CausalContext
from quern.model.count import FlopCounter
from quern.resolve import batch_rule
from quern.serve.server import create_app
from quern.text.tokenizer import Tokenizer
from tests.support.http_server import counters, running
from tests.support.jax_process import environment
from tests.support.line_server import ROOT
from tests.support.rows import write_rows
from tests.support.toy_training import CPU

PLAIN = ["--no-compile", "--threads", "1", "--dtype", "fp32"]
QUICK = ["--quick", *PLAIN, "--seed", "5"]


def measured(out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The records of `quern bench` by name, and what it printed."""
    said: list[str] = []
    options = read(BenchOptions, [*arguments, "--out", str(out)], prog="quern bench")
    assert command.run(options, said.append, "quern bench typed") == 0
    bodies = [json.loads(path.read_text(encoding="utf-8")) for path in (out / "bench").iterdir()]
    return {body["what"]: body for body in bodies}, "\n".join(said)


def test_jobs_alternate_and_the_first_pass_does_not_count() -> None:
    clock = iter(range(100))
    taken = alternate(3, {"a": lambda: next(clock), "b": lambda: next(clock)})
    assert {name: values.tolist() for name, values in taken.items()} == {"a": [3, 4, 7], "b": [2, 5, 6]}


def test_numbers_read_well() -> None:
    numbers = (14210.4, 123.45, 12.345, 0.0123, 0.0, 12e-5)
    assert [number(value) for value in numbers] == ["14,210", "123.5", "12.35", "0.012", "0.000", "1.2e-04"]


def test_a_rate_needs_no_second_request_of_a_client() -> None:
    one = [Reply(0.0, 0, [1.0, 2.0], usage={"completion_tokens": 10})]
    assert rate(one) == 5
    assert rate([*one, Reply(0.5, 1, [1.5, 4.5], usage={"completion_tokens": 8})]) == (10 + 4) / 2


def test_the_reference_costs_34_6_megaflop_a_token() -> None:
    recipe = reference(quick=False, seed=0)
    matmul = 4 * 12 * 256**2 + 8192 * 256  # the blocks' matrices and the head
    attention = 4 * 12 * 4 * 64 * 513 / 2  # every window full; a query sees half of the context in the mean
    by_hand = 6 * matmul + attention
    assert recipe.model.window_sizes() == [None] * 4
    # Beside the large matrices only the value embeddings' gates are counted, if at all.
    assert FlopCounter(recipe).per_token() == pytest.approx(by_hand, rel=1e-3)
    assert f"{by_hand / 1e6:.1f}" == "34.6"


@pytest.mark.parametrize("batch_tokens", [512, 16384])
def test_a_random_batch_has_the_tokens_asked_for(batch_tokens: int) -> None:
    recipe = reference(quick=False, seed=0, batch_tokens=batch_tokens)
    batch = random_batch(recipe, 1)
    assert batch.mask.all() and batch.mask.size == batch_tokens
    assert (batch.targets[:, :-1] == batch.tokens[:, 1:]).all()
    assert batch.tokens.min() >= 0 and batch.tokens.max() < 8192
    assert not (random_batch(recipe, 2).tokens == batch.tokens).all()
    assert (recipe.train.micro_batch_tokens or 0) == min(4096, batch_tokens)


def test_no_reply_of_the_talking_engine_ends_early() -> None:
    recipe = reference(quick=True, seed=3)
    engine = talking_engine(recipe, CPU)
    model, tokenizer = engine.model, engine.tokenizer
    with torch.inference_mode():
        tokens = torch.from_numpy(random_batch(recipe, 0).tokens).long()
        shares = model.logits(model(tokens, CausalContext())).softmax(-1)
    assert float(shares[..., list(tokenizer.special_ids.values())].sum(-1).max()) < 1e-4
    for temperature in (0.0, 1.0):
        done = engine.generate([[tokenizer.bos, 1, 2]] * 16, max_tokens=60, sampling=Sampling(temperature), seed=1)
        assert [len(row[0].ids) for row in done] == [60] * 16
        assert {row[0].finish_reason for row in done} == {"length"}


def test_every_benchmark_prints_and_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those that have a test of their own."""
    monkeypatch.setattr("quern.process.SILENT_SECONDS", 0.0)
    names = [*(run.__name__.replace("_", "-") for run in command.QUICK if run.__name__ != "train"), "prepare"]
    found, shown = measured(tmp_path, *names, *QUICK, "--rounds", "1")
    assert sorted(found) == sorted(names)
    for name, body in found.items():
        check_record(body, rounds=1)
        assert f"\n{name}  (" in shown and f"waiting for the figures of {name}\n" in shown
    units = {name: {m["unit"] for m in body["measures"]} for name, body in found.items()}
    assert "MB/s" in units["tokenizer"] and {"MB/s", "tokens/s"} <= units["encode"]
    measures = {name: {m["name"] for m in body["measures"]} for name, body in found.items()}
    assert measures["prefill"] == {f"prefill, batch {n}" for n in (1, 8, 32)}
    figures = ("start", "resume in mid-epoch", "peak memory")
    assert {f"20,000 documents: {name}" for name in figures} <= measures["packing"]
    ratios = {f"T=64: full / window 16, {way}" for way in ("as picked", "sdpa forward", "sdpa backward")}
    assert ratios <= measures["attention"]
    for path in ("plain", "blocked", "sdpa"):
        ways = [f"{path} {way}" for way in ("forward", "backward")]
        expected = {f"T=64, {mask}: {way}" for way in ways for mask in ("full", "window 16", "documents")}
        assert expected <= measures["attention"]
    assert found["attention"]["settings"]["picked"] == "blocked"
    losses = {f"{name}: {what}" for name in ("chunked", "full / chunked") for what in ("time", "memory")}
    assert losses <= measures["cross-entropy"]
    assert all(part in shown for part in ("mean nothing", "torch 2", "seed 5", "float32"))

    prepared = {(one["name"], one["unit"]): one for one in found["prepare"]["measures"]}
    keys = ("1 worker", "MB/s"), ("2 workers", "MB/s"), ("2 workers / 1", "×")
    one, two, gain = (prepared[key]["values"] for key in keys)
    assert gain == pytest.approx([b / a for a, b in zip(one, two, strict=True)])
    if sys.platform == "linux":  # two Python processes with NumPy
        assert prepared["memory, 2 workers", "MB"]["median"] > 40 + prepared["memory, 1 worker", "MB"]["median"]


def check_record(body: dict, rounds: int) -> None:
    assert body["seed"] == 5 and body["rounds"] == rounds and body["quick"] is True
    assert body["machine"]["dtype"] == "float32" and body["machine"]["threads"] == 1
    assert body["versions"]["torch"] == torch.__version__
    for measure in body["measures"]:
        values = measure["values"]
        assert values and all(math.isfinite(value) and value > 0 for value in values), measure
        assert measure["median"] == statistics.median(values)
        assert measure["low"] == min(values) and measure["high"] == max(values)


PEAK = """
import torch
from quern.machine import Machine
from quern.bench.measure import peak_bytes
kept = torch.ones(2**24)
def job():
    once = torch.full((2**24,), 1.0)
    del once
    held = [torch.full((2**22,), 1.0) for _ in range(2)]
print(peak_bytes(job, Machine(torch.device("cpu"), torch.float32, compile=False, threads=1)) / kept.nbytes)
"""


def test_the_peak_of_a_call_is_what_it_holds_at_once() -> None:
    """Not the bytes held at its end, not the sum of all allocations, not the bytes held before it."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, encoding="utf-8", check=True)
    assert float(done.stdout) == pytest.approx(1, rel=0.05)


def test_training_reports_speed_against_the_peak_of_its_rounds(tmp_path: Path) -> None:
    body = measured(tmp_path, "train", *QUICK, "--rounds", "2")[0]["train"]
    check_record(body, rounds=2)
    by_name = {m["name"]: m["values"] for m in body["measures"]}
    flops = FlopCounter(reference(quick=True, seed=5)).per_token()
    peaks = by_name["matmul peak"]
    assert len(peaks) == 5  # before the first, and after each of two sizes in two rounds
    for place, step in enumerate((", steps of 128 tokens", ", steps of 4,096 tokens")):
        for round_, (speed, usage) in enumerate(zip(by_name[f"training{step}"], by_name[f"MFU{step}"], strict=True)):
            before = 2 * round_ + place
            peak = 1e12 * (peaks[before] + peaks[before + 1]) / 2
            assert usage == pytest.approx(100 * speed * flops / peak)
    assert by_name["start to first step, eager"][0] > 0.1
    assert 50 < by_name["peak memory"][0] < 8000


def test_the_second_step_is_what_the_recipe_picks() -> None:
    asked = reference(quick=False, seed=5, batch_tokens=8192)
    own = left_to_itself(asked)
    assert own.train.batch_tokens == batch_rule(12 * (12 * 4 * 256**2 + 8192 * 256), 512) == 32_768
    assert own.train.micro_batch_tokens == asked.train.micro_batch_tokens and own.model == asked.model


def test_quality_counts_every_byte_once(tmp_path: Path) -> None:
    # Documents of a few bytes, of several windows, and with characters of several bytes.
    texts = [f"The miller grinds grain number {i}, ça va? 你好. " * (1 + i % 90) for i in range(200)]
    paths = {split: tmp_path / f"{split}.jsonl" for split in ("train", "val")}
    for path, part in zip(paths.values(), (texts[40:], texts[:40]), strict=True):
        write_rows(path, [{"text": text} for text in part])
    files = [str(part) for split, path in paths.items() for part in (f"--{split}", path)]
    flags = ["--data", str(paths["train"]), "--minutes", "0.01", "--quick", *PLAIN]
    found, shown = measured(tmp_path, "quality", *files, *flags)
    body = found["quality"]
    size = sum(len(text.encode("utf-8")) for text in texts[:40])
    assert body["settings"]["validation_bytes_counted"] == body["settings"]["validation_bytes_of_text"] == size
    scored = next(m for m in body["measures"] if m["unit"] == "bits/byte")
    nats = next(m for m in body["measures"] if m["unit"] == "nats/token")
    tokens = body["settings"]["validation_tokens"]
    assert scored["median"] == pytest.approx(nats["median"] * tokens / math.log(2) / size)
    run = tmp_path / "runs" / body["settings"]["run"]
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["command"] == "quern bench typed"
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    assert tokens == sum(len(tokenizer.encode(text)) for text in texts[:40])
    assert f"{size:,} bytes" in shown and " 1 thread," in shown
    assert body["settings"]["layers"] == body["settings"]["layers_once"] == 1  # as asked, not as fitted to the text
    second = {m["name"]: m["median"] for m in body["measures"] if m["name"].startswith("text read once")}
    assert 0 < second["text read once"] != scored["median"]
    tokens, flops = second["text read once: trained on"], second["text read once: FLOPs spent"]
    assert 1e15 * flops > 6 * tokens * 512 * body["settings"]["width_once"]  # the head alone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quality"], "give --train and --val"),
        (["quality", "--train", "x"], "give --train and --val"),
        (["train", "--batch-tokens", "700"], "multiple of the 512"),
        (["ranks", "--batch-tokens", "512"], "set --batch-tokens 1024"),
        (["train", "--trace", "x"], "--trace is for `quern bench ranks`: name ranks, or leave"),
        (["--depth", "2"], "--depth is for `quern bench quality`"),
        (["--out", ""], "--out is empty: give a path"),
    ],
)
def test_nonsense_is_refused_before_anything_is_measured(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(BenchOptions, arguments, prog="quern bench")


def test_a_text_without_words_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="empty.txt has no text: give a file or a folder of text"):
        measured(tmp_path, "packing", "--data", str(tmp_path / "empty.txt"), *PLAIN)


@pytest.mark.parametrize("what", ["grug", "serve"])
def test_packages_that_are_missing_are_named(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"quern.bench.{'jax' if what == 'grug' else what}", None)
    with pytest.raises(ImportError, match=r"this benchmark needs extra packages \(.*\): .*\[(jax|serve)\]"):
        measured(tmp_path, what, *QUICK)


def test_two_processes_against_one(tmp_path: Path) -> None:
    """They alternate on the same global batches."""
    trace = tmp_path / "trace.json"
    body = measured(tmp_path, "ranks", "--trace", str(trace), *QUICK, "--rounds", "1")[0]["ranks"]
    found = {one["name"]: one["values"] for one in body["measures"]}
    assert all(len(v) == 1 + n.startswith("timeline") and all(map(math.isfinite, v)) for n, v in found.items())
    one, two = found["one process, two threads"], found["two processes, one thread each"]
    assert found["two processes over one"] == pytest.approx([100 * b / a for a, b in zip(one, two, strict=True)])
    assert all(seconds > 0 for seconds in found["waiting for gradients, none leave early"])
    spans = [event for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] if event["ph"] == "X"]
    names = [{event["name"] for event in spans if event["pid"] == rank} for rank in (0, 1)]
    expected = {"last backward pass", "update", "gloo:all_reduce", "gloo:all_gather", "waiting: all_gather over data"}
    assert all(own > expected for own in names)
    for name in ("gloo:all_reduce", "gloo:all_gather"):
        assert len(found[f"timeline: {name}"]) == 2 and all(0 <= v <= 100 for v in found[f"timeline: {name}, hidden"])


def test_text_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("the cat sat on the mat, the dog did not. " * 200, encoding="utf-8")
    found, _ = measured(tmp_path, "encode", "--data", str(tmp_path / "own.txt"), *QUICK)
    assert found["encode"]["settings"]["text"] == "own.txt" and found["encode"]["settings"]["bytes"] == 41 * 200


@pytest.mark.parametrize("megabytes", [8, 0])
def test_a_second_turn_reads_only_what_is_new(megabytes: float) -> None:
    """The first turn's prompt is cached, if there is a cache, and the second turn almost fills the context."""
    recipe = reference(quick=True, seed=0)
    recipe = replace(recipe, model=replace(recipe.model, context=256))
    engine = talking_engine(recipe, CPU, prefix_megabytes=megabytes)
    setup = Setup(machine=CPU, quick=True, rounds=1)
    with running(create_app({NAME: engine})) as url:
        first, second, ratio = second_turns(setup, int(url.rpartition(":")[2]), engine.context)
        hits = counters(url)["prefix_cache_hits_total"]
    prompt = engine.context - 9 - 2 * TURN_REPLY - QUESTION + 4  # BOS, two around the question, one before the reply
    assert first["name"] == f"first turn of {prompt} tokens: time to first token, median"
    assert ratio["values"] == pytest.approx([a / b for a, b in zip(first["values"], second["values"], strict=True)])
    assert len(ratio["values"]) == 1
    if engine.prefixes is None:
        assert ratio["note"] == "0% of the prompt cached"
        return
    share = float(ratio["note"].partition("%")[0]) / 100
    assert prompt / engine.context <= share < 1
    assert hits == pytest.approx(2 * 8 * prompt, rel=0.1), "first turns were cached as well"


# Both trainers ----------------------------------------------------------------------------------------------


@pytest.fixture
def compiled_quickly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(tmp_path / "compiled", devices=1).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("compiled_quickly")
def test_both_trainers_are_measured_and_recorded(tmp_path: Path) -> None:
    found, shown = measured(tmp_path, "grug", *QUICK, "--rounds", "2")
    check_record(found["grug"], rounds=2)
    measures = {measure["name"]: measure["values"] for measure in found["grug"]["measures"]}
    trainers = ["PyTorch", "JAX, whole loss", "JAX, blockwise loss"]
    assert list(measures) == [*trainers, "JAX / PyTorch", "whole / blockwise"]
    assert all(len(values) == 2 for values in measures.values())
    whole, blocks = measures["JAX, whole loss"], measures["JAX, blockwise loss"]
    assert measures["whole / blockwise"] == pytest.approx([a / b for a, b in zip(whole, blocks, strict=True)])
    assert found["grug"]["settings"]["jax"] and "JAX / PyTorch" in shown


THREADS = """
import os, sys
from quern.grug.mesh import use_device
allowed = os.sched_getaffinity(0)
use_device("cpu", int(sys.argv[1]))
assert {frozenset(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")} == {frozenset(allowed)}
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_jax_takes_the_threads_it_is_given_and_no_certain_processors() -> None:
    """Trials side by side would share the first ones."""
    one, two = (
        int(subprocess.check_output([sys.executable, "-c", THREADS, str(threads)], cwd=ROOT, text=True, timeout=120))
        for threads in (1, 2)
    )
    assert one < two


TORCH_FREE = """
import json, sys
from quern.bench import jax
try:
    list(jax.answers(json.loads(sys.argv[1]), iter(["facts"])))
except ValueError as error:  # when it has the state of the training, and traces the step
    print("torch" in sys.modules, "jax" in sys.modules, error)
"""


@pytest.mark.usefixtures("compiled_quickly")
def test_the_jax_process_loads_no_torch() -> None:
    order = {"recipe": reference(True, 5).to_json(), "block_tokens": 17, "device": "cpu", "threads": 1}
    asked = [sys.executable, "-c", TORCH_FREE, json.dumps(order)]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("False True blocks of 17 positions"), done.stdout + done.stderr
