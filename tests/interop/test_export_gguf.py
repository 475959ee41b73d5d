"""GGUF export as someone uses it: the file and its contents, the dtypes, what is refused, nothing by halves.

That llama.cpp computes the same is a law of its own (tests/laws/test_gguf_law.py).
"""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quern.cli import main
from quern.flags.recipe_flags import Arguments
from quern.interop import export_gguf
from quern.interop.command import export_plan, plan
from quern.runs.run_dir import RunDir
from quern.terminal import silent
from quern.text.tokenizer import Tokenizer
from tests.support.exported import model_of, toy_recipe, write_run
from tests.support.full_disk import full_disk
from tests.support.gguf_run import BLOCKS, gguf_recipe, single_digits
from tests.support.llama_cpp import LlamaCpp
from tests.support.toy_engine import toy_tokenizer

gguf = pytest.importorskip("gguf")

pytestmark = pytest.mark.usefixtures("eager")


def toy_run(out: Path, tokenizer: Tokenizer | None = None, **shape: Any) -> RunDir:
    tokenizer = tokenizer or single_digits()
    return write_run(out, gguf_recipe(tokenizer, **shape), tokenizer)


def tensors_of(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_a_run_becomes_a_file_that_llama_cpp_loads(
    llama: LlamaCpp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line, with the tokenizer that llama.cpp has; then refused without it."""
    out = ["--out", str(tmp_path)]
    toy_run(tmp_path / "one", **BLOCKS)
    export = f"export --to gguf --dtype q8_0 --dir {tmp_path}/files --out {tmp_path}/one".split()
    assert main.main(export) == 0
    assert "step 7 of pretrain" in capsys.readouterr().out
    facts = llama.open(tmp_path / "files" / "first-q8_0.gguf")
    assert facts["metadata"]["general"]["name"] == "first" and facts["context"] == 48
    assert facts["metadata"]["tokenizer"]["ggml"]["pre"] == "qwen35"
    assert main.main(export) == 1
    assert "first-q8_0.gguf is there already: name another file with --dir" in capsys.readouterr().err
    toy_run(tmp_path, toy_tokenizer())
    export = ["export", "--to", "gguf", "--run", "first", "--dir", str(tmp_path / "two.gguf"), *out]
    assert main.main(export) == 1
    assert "ids would differ: train with --text.digits 1" in capsys.readouterr().err
    assert not (tmp_path / "two.gguf").exists()
    assert main.main([*export, "--accept-other-ids"]) == 0
    assert "warning: llama.cpp has no split like this tokenizer's" in capsys.readouterr().out
    assert llama.open(tmp_path / "two.gguf")["metadata"]["tokenizer"]["ggml"]["pre"] == "qwen35"


def test_a_planned_export_is_refused_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy_tokenizer().save(tmp_path / "two-digits.json")
    flags = ["--text.tokenizer", str(tmp_path / "two-digits.json"), "--out", str(tmp_path / "out")]
    assert main.main(["run", "--for", "ollama", *flags]) == 1
    assert "leave --text.tokenizer or --for ollama out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_planned_export_is_written_once_and_its_command_is_told(tmp_path: Path) -> None:
    planned = plan(Arguments(("--for", "ollama", "--run", "a")))
    assert planned == ("llama", "--for", "ollama", "--run", "a", "--text.digits", "1")
    for kept in (("--run", "a"), ("gpt", "--for", "transformers"), ("--resume", "--for", "ollama")):
        assert plan(Arguments(kept)) == kept
    run_dir, lines = toy_run(tmp_path / "it's 5%", **BLOCKS), list[str]()
    for _ in range(2):
        export_plan("ollama", run_dir, lines.append)
    path = run_dir.folder / "export" / f"{run_dir.run}.gguf"
    assert tensors_of(path) and len(lines) == 4 and lines[1] == lines[3] and "was there already" in lines[2]
    written, _, created = lines[1].removeprefix("for ollama: ").partition("; ")
    subprocess.run(["sh", "-c", written], cwd=tmp_path, check=True)
    assert (tmp_path / "Modelfile").read_text(encoding="utf-8") == f"FROM {path}\n"
    assert created == f"ollama create {run_dir.run} -f Modelfile"
    export_plan("llama.cpp", run_dir, lines.append)
    assert shlex.split(lines[-1]) == ["for", "llama.cpp:", "llama-cli", "-m", str(path)]


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("dtype", export_gguf.TYPES)
def test_every_weight_is_the_nearest_of_its_dtype(dtype: str, tmp_path: Path) -> None:
    """Against torch's own roundings; Q8_0 by hand: integers of at most 127, times a scale for 32 weights."""
    run_dir = toy_run(tmp_path, **BLOCKS)
    path = export_gguf.run(run_dir, tmp_path / f"{dtype}.gguf", stage=None, dtype=dtype, log=silent)
    found, weights = tensors_of(path), model_of(gguf_recipe(single_digits(), **BLOCKS)).state_dict()
    assert {t.tensor_type.name for t in found.values()} == {"F32", export_gguf.TYPES[dtype]}
    norm, value = found["blk.1.ffn_norm.weight"], found["blk.1.attn_v.weight"]
    assert norm.tensor_type.name == "F32"
    assert np.array_equal(norm.data, weights["blocks.1.mlp_norm.weight"].numpy())
    expected = weights["blocks.1.attention.value.weight"]
    if dtype == "fp32":
        assert np.array_equal(value.data, expected.numpy())
    elif dtype == "fp16":
        assert np.array_equal(value.data, expected.half().numpy())
    elif dtype == "bf16":
        assert np.array_equal(value.data.view(np.uint16), bits_of(expected.bfloat16()))
    else:
        blocks = value.data.reshape(-1, 2 + 32)
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        steps = blocks[:, 2:].copy().view(np.int8).astype(np.float32)
        wanted = expected.numpy().reshape(-1, 32)
        assert np.allclose(scales[:, 0], np.abs(wanted).max(1) / 127, rtol=2.0**-11)
        # Half a step, and the rounding of the scale to fp16 at up to 127 steps.
        assert (np.abs(scales * steps - wanted) <= scales * (0.5 + 127 * 2.0**-11) * 1.001).all()


def test_rows_that_q8_0_cannot_hold_are_fp16(llama: LlamaCpp, tmp_path: Path) -> None:
    said: list[str] = []
    path = export_gguf.run(toy_run(tmp_path), tmp_path / "a.gguf", stage=None, dtype="q8_0", log=said.append)
    assert "Q8_0 needs rows of a multiple of 32 weights" in said[0]
    assert {t.tensor_type.name for t in tensors_of(path).values()} == {"F16", "F32"}
    llama.open(path)


def test_a_weight_that_fp16_cannot_hold_is_refused(tmp_path: Path) -> None:
    weights = {"token_embd.weight": torch.tensor([[7e4, 1.0]])}
    with pytest.raises(ValueError, match=r"token_embd.weight has a weight of 70,000, too large for fp16: .* bf16"):
        export_gguf.kinds_of(weights, "F16", silent)
    assert export_gguf.kinds_of(weights, "BF16", silent) == {"token_embd.weight": "BF16"}


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    run_dir = toy_run(tmp_path / "out")
    with full_disk(20_000), pytest.raises(OSError, match=r"cannot write .*/a.gguf \(.*\): make room there, or choose"):
        export_gguf.run(run_dir, tmp_path / "a.gguf", stage=None, dtype="fp32", log=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


REFUSED: list[tuple[Callable[[Path], RunDir], str]] = [
    (lambda out: toy_run(out, windows="SL"), r"the Llama of other programs has no windows \(SL\)"),
    (
        lambda out: write_run(out, toy_recipe("gpt")),
        "is no Llama, which alone llama.cpp knows: export a run of",
    ),
    (lambda out: toy_run(out, vocab_size=320), "the model has 320 embeddings for 330 tokens"),
    (
        lambda out: toy_run(out, Tokenizer(toy_tokenizer().merges, r"\p{L}+|\P{L}+")),
        "so ids would differ: .* or accept other ids with --accept-other-ids",
    ),
    (
        lambda out: toy_run(out, Tokenizer([b"abc", b"bcd"], single_digits().pattern)),
        "llama.cpp never forms 2 of the tokenizer's 2 merges",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_llama_cpp_cannot_have_is_refused(make: Callable[[Path], RunDir], message: str, tmp_path: Path) -> None:
    run_dir = make(tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        export_gguf.run(run_dir, tmp_path / "a.gguf", stage=None, dtype="fp32", log=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
