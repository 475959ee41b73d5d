"""The benchmarks: their counts, order of jobs, records and refusals, but no speed."""

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quern.bench import command
from quern.bench.batches import random_batch
from quern.bench.data import shards
from quern.bench.material import left_to_itself, pair_tokenizer, reference, talking_model
from quern.bench.measure import Bench, alternate, figure, number
from quern.bench.options import read_options
from quern.bench.train import first_step
from quern.generate.engine import Engine
from quern.generate.sampling import Sampling
from quern.machine import Machine
from quern.model.context import CausalContext
from quern.model.count import FlopCounter
from quern.resolve import batch_rule
from quern.text.tokenizer import Tokenizer

CPU = Machine(torch.device("cpu"), torch.float32, compile=False, threads=1)
STEPS = (", steps of 128 tokens", ", steps of 4,096 tokens")  # of the quick size
QUICK = ["--quick", "--rounds", "2", "--no-compile", "--threads", "1", "--dtype", "fp32"]


@pytest.fixture
def said() -> list[str]:
    return []


def records(out: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (out / "bench").iterdir()}


def test_jobs_alternate_and_the_first_pass_does_not_count() -> None:
    calls: list[str] = []
    clock = iter(range(100))

    def job(name: str):
        def run() -> float:
            calls.append(name)
            return float(next(clock))

        return run

    taken = alternate(3, {"a": job("a"), "b": job("b")})
    assert "".join(calls) == "abbaabba"
    assert {name: values.tolist() for name, values in taken.items()} == {"a": [3.0, 4.0, 7.0], "b": [2.0, 5.0, 6.0]}


def test_a_figure_says_median_and_spread() -> None:
    body = figure("x", "s", (3.0, 1.0, 2.0))
    assert (body["low"], body["median"], body["high"]) == (1.0, 2.0, 3.0)
    assert body["values"] == [3.0, 1.0, 2.0] and "note" not in body


NUMBERS = [
    (14210.4, "14,210"),
    (123.45, "123.5"),
    (12.345, "12.35"),
    (0.0123, "0.012"),
    (0.0, "0.000"),
    (12e-5, "1.2e-04"),
]


@pytest.mark.parametrize(("value", "text"), NUMBERS)
def test_numbers_read_well(value: float, text: str) -> None:
    assert number(value) == text


def test_the_reference_costs_34_6_megaflop_a_token() -> None:
    recipe = reference(quick=False, seed=0)
    matmul = 4 * 12 * 256**2 + 8192 * 256  # the blocks' matrices and the head
    attention = 4 * 12 * 4 * 64 * 513 / 2  # every window full; a query sees half of the context in the mean
    by_hand = 6 * matmul + attention
    assert recipe.model.window_sizes() == [None] * 4
    # Beside the large matrices only the value embeddings' gates are counted, if at all.
    assert FlopCounter(recipe).per_token() == pytest.approx(by_hand, rel=1e-3)
    assert f"{by_hand / 1e6:.1f}" == "34.6"


@pytest.mark.parametrize("batch_tokens", [512, 4096, 16384])
def test_a_random_batch_has_the_tokens_asked_for(batch_tokens: int) -> None:
    recipe = reference(quick=False, seed=0, batch_tokens=batch_tokens)
    batch = random_batch(recipe, 1)
    assert batch.mask.all() and batch.mask.size == batch_tokens
    assert (batch.targets[:, :-1] == batch.tokens[:, 1:]).all()
    assert batch.tokens.min() >= 0 and batch.tokens.max() < 8192
    assert not (random_batch(recipe, 2).tokens == batch.tokens).all()
    assert (recipe.train.micro_batch_tokens or 0) == min(4096, batch_tokens)


def test_the_untrained_tokenizer_has_its_size_and_works() -> None:
    tokenizer = pair_tokenizer(8192)
    assert tokenizer.vocab_size == 8192
    assert tokenizer.decode(tokenizer.encode("Grüße, world")) == "Grüße, world"


def test_no_reply_of_the_talking_model_ends_early() -> None:
    recipe = reference(quick=True, seed=3)
    tokenizer = pair_tokenizer(512)
    model = talking_model(recipe, tokenizer, CPU)
    with torch.inference_mode():
        tokens = torch.from_numpy(random_batch(recipe, 0).tokens).long()
        shares = model.logits(model(tokens, CausalContext())).softmax(-1)
    assert float(shares[..., list(tokenizer.special_ids.values())].sum(-1).max()) < 1e-4
    engine = Engine(model, tokenizer, CPU)
    for temperature in (0.0, 1.0):
        done = engine.generate([[tokenizer.bos, 1, 2]] * 16, max_tokens=60, sampling=Sampling(temperature), seed=1)
        assert [len(row[0].ids) for row in done] == [60] * 16
        assert {row[0].finish_reason for row in done} == {"length"}


def test_shards_hold_the_documents() -> None:
    import numpy as np

    documents = [np.array([0, 5, 6]), np.array([0, 7])]
    with shards(documents) as corpus:
        assert corpus.num_documents == 2
        assert [corpus.gather(i).tolist() for i in range(2)] == [[0, 5, 6], [0, 7]]


def test_every_quick_benchmark_prints_and_records(tmp_path: Path, said: list[str]) -> None:
    names = [run.__name__.replace("_", "-") for run in command.QUICK if run.__name__ != "train"]
    assert command.run(read_options([*names, *QUICK, "--out", str(tmp_path), "--seed", "5"]), said.append) == 0
    found = records(tmp_path)
    assert sorted(found) == sorted(names)
    for name, body in found.items():
        check_record(name, body)
        assert any(line.startswith(f"\n{name}  (") for line in said)
    units = {name: {m["unit"] for m in body["measures"]} for name, body in found.items()}
    assert "MB/s" in units["tokenizer"] and {"MB/s", "tokens/s"} <= units["encode"]
    assert {m["name"] for m in found["prefill"]["measures"]} == {f"prefill, batch {n}" for n in (1, 8, 32)}
    loader = [m["name"] for m in found["packing"]["measures"]]
    figures = ("start", "resume in mid-epoch", "resume without row counts", "peak memory")
    assert {f"20,000 documents: {name}" for name in figures} <= set(loader)
    attention = [m["name"] for m in found["attention"]["measures"]]
    for path in ("plain", "blocked", "sdpa"):
        for way in ("forward", "backward"):
            assert all(f"T=64, {mask}: {path} {way}" in attention for mask in ("full", "window 16", "documents"))
    assert "T=64: full / window 16, as picked" in attention
    assert found["attention"]["settings"]["picked"].startswith("full blocked, window blocked")
    loss = [m["name"] for m in found["cross-entropy"]["measures"]]
    assert {"chunked: time", "full / chunked: time", "chunked: memory", "full / chunked: memory"} <= set(loss)
    shown = "\n".join(said)
    assert "mean nothing" in shown and "torch 2" in shown and "seed 5" in shown and "float32" in shown


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


def test_preparation_with_one_and_two_workers(tmp_path: Path, said: list[str]) -> None:
    assert command.run(read_options(["prepare", *QUICK, "--out", str(tmp_path)]), said.append) == 0
    record = records(tmp_path)["prepare"]
    found = {(one["name"], one["unit"]): one for one in record["measures"]}
    one, two, gain = (
        found[key]["values"] for key in (("1 worker", "MB/s"), ("2 workers", "MB/s"), ("2 workers / 1", "×"))
    )
    assert all(g == pytest.approx(b / a) for a, b, g in zip(one, two, gain, strict=True))
    assert found["2 workers", "MB/s of processor time"]["median"] > 0 < found["reading alone", "MB/s"]["median"]
    assert 11 < record["settings"]["megabytes"] < 13
    if sys.platform == "linux":  # two Python processes with NumPy
        assert found["memory, 2 workers", "MB"]["median"] > 40 + found["memory, 1 worker", "MB"]["median"]


def test_the_peak_of_a_call_is_what_it_holds_at_once() -> None:
    """Not the bytes held at its end, not the sum of all allocations, not the bytes held before it."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, encoding="utf-8", check=True)
    assert float(done.stdout) == pytest.approx(1, rel=0.05)


def check_record(name: str, body: dict) -> None:
    assert body["what"] == name and body["seed"] == 5 and body["rounds"] == 2 and body["quick"] is True
    assert body["machine"]["dtype"] == "float32" and body["machine"]["threads"] == 1
    assert body["versions"]["torch"] == torch.__version__
    for measure in body["measures"]:
        values = measure["values"]
        assert values and all(math.isfinite(value) and value > 0 for value in values), measure
        assert measure["median"] == statistics.median(values)
        assert measure["low"] == min(values) and measure["high"] == max(values)


def test_training_reports_speed_against_the_peak_of_its_rounds(tmp_path: Path, said: list[str]) -> None:
    assert command.run(read_options(["train", *QUICK, "--out", str(tmp_path), "--seed", "5"]), said.append) == 0
    body = records(tmp_path)["train"]
    check_record("train", body)
    by_name = {m["name"]: m["values"] for m in body["measures"]}
    flops = FlopCounter(reference(quick=True, seed=5)).per_token()
    peaks = by_name["matmul peak"]
    assert len(peaks) == 5  # before the first, and after each of two sizes in two rounds
    for place, step in enumerate(STEPS):
        for round_, (speed, usage) in enumerate(zip(by_name[f"training{step}"], by_name[f"MFU{step}"], strict=True)):
            before = 2 * round_ + place
            peak = 1e12 * (peaks[before] + peaks[before + 1]) / 2
            assert usage == pytest.approx(100 * speed * flops / peak)
    assert by_name["start to first step, eager"][0] > 0.1
    assert 50 < by_name["peak memory"][0] < 8000


def test_starts_can_be_left_out(tmp_path: Path, said: list[str]) -> None:
    assert command.run(read_options(["train", *QUICK, "--no-start", "--out", str(tmp_path)]), said.append) == 0
    names = [m["name"] for m in records(tmp_path)["train"]["measures"]]
    assert names == [*(f"{what}{step}" for step in STEPS for what in ("training", "MFU")), "matmul peak"]


def test_the_second_step_is_what_the_recipe_picks() -> None:
    asked = reference(quick=False, seed=5, batch_tokens=8192)
    own = left_to_itself(asked)
    assert own.train.batch_tokens == batch_rule(12 * (12 * 4 * 256**2 + 8192 * 256), 512) == 32_768
    assert own.train.micro_batch_tokens == asked.train.micro_batch_tokens and own.model == asked.model


def test_a_start_that_fails_says_why() -> None:
    nowhere = Machine(torch.device("meta"), torch.float32, compile=False, threads=1)
    with pytest.raises(RuntimeError, match="device 'meta' is not available here"):
        first_step(Bench(nowhere, 0, True), 4096, "")


def test_quality_counts_every_byte_once(tmp_path: Path, said: list[str]) -> None:
    # Documents of a few bytes, of several windows, and with characters of several bytes.
    texts = [f"The miller grinds grain number {i}, ça va? 你好. " * (1 + i % 90) for i in range(400)]
    for split, part in (("train", texts[40:]), ("val", texts[:40])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (tmp_path / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    arguments = ["--train", str(tmp_path / "train.jsonl"), "--val", str(tmp_path / "val.jsonl")]
    arguments += ["--data", str(tmp_path / "train.jsonl")]
    settings = ["--minutes", "0.01", "--depth", "1", "--no-compile", "--threads", "1", "--dtype", "fp32"]
    assert command.run(read_options(["quality", *arguments, *settings, "--out", str(tmp_path)]), said.append) == 0
    body = records(tmp_path)["quality"]
    size = sum(len(text.encode("utf-8")) for text in texts[:40])
    assert body["settings"]["validation_bytes_counted"] == body["settings"]["validation_bytes_of_text"] == size
    scored = next(m for m in body["measures"] if m["unit"] == "bits/byte")
    nats = next(m for m in body["measures"] if m["unit"] == "nats/token")
    tokens = body["settings"]["validation_tokens"]
    assert scored["median"] == pytest.approx(nats["median"] * tokens / math.log(2) / size)
    tokenizer = Tokenizer.load(tmp_path / "runs" / body["settings"]["run"] / "tokenizer.json")
    assert tokens == sum(len(tokenizer.encode(text)) for text in texts[:40])
    assert f"{size:,} bytes" in "\n".join(said)
    second = {m["name"]: m["median"] for m in body["measures"] if m["name"].startswith("text read once")}
    assert 0 < second["text read once"] != scored["median"]
    tokens, flops = second["text read once: trained on"], second["text read once: FLOPs spent"]
    assert 1e15 * flops > 6 * tokens * 512 * body["settings"]["width_once"]  # the head alone


def test_a_mistyped_name_names_the_valid_ones(said: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        command.run(read_options(["trian"]), said.append)
    assert all(name in str(refused.value) for name in ("train", "decode", "quality", "attention", "not 'trian'"))
    assert said == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quality"], "give --train and --val"),
        (["quality", "--train", "x"], "give --train and --val"),
        (["train", "--batch-tokens", "700"], "multiple of the 512"),
        (["encode", "--data", "no/such/file.txt"], "there is no no/such/file.txt"),
    ],
)
def test_nonsense_is_refused_before_anything_is_measured(
    arguments: list[str], message: str, tmp_path: Path, said: list[str]
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        command.run(read_options([*arguments, "--out", str(tmp_path)]), said.append)
    assert said == [] and list(tmp_path.iterdir()) == []


def test_text_from_a_file(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "own.txt").write_text("the cat sat on the mat, the dog did not. " * 200, encoding="utf-8")
    arguments = ["encode", "--data", str(tmp_path / "own.txt"), *QUICK, "--out", str(tmp_path)]
    assert command.run(read_options(arguments), said.append) == 0
    settings = records(tmp_path)["encode"]["settings"]
    assert settings["text"] == "own.txt" and settings["bytes"] == 41 * 200
