"""quern under torchrun, by the lines of docs/parallelism.md: two ranks over gloo train a toy model."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from quern.train import checkpoint, manifest

ROOT = Path(__file__).parents[2]
LINES = [
    line
    for line in (ROOT / "docs/parallelism.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("torchrun ")
]
TOY = """--depth 2 --text.vocab-size 320 --model.width 32 --model.head-dim 16 --model.context 48 --train.steps 2
 --train.batch-tokens 192 --no-compile --dtype fp32 --threads 1 --device cpu""".split()


@pytest.mark.parametrize("line", [LINES[0], *(pytest.param(line, marks=pytest.mark.campaign) for line in LINES[1:])])
def test_torchrun_starts_the_ranks(line: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a word and another word, \n\n" * 500, encoding="utf-8")
    assert len(LINES) == 2 and "--depth 8 --run eight" in line
    (tmp_path / "quern").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m quern "$@"\n', encoding="utf-8")
    (tmp_path / "quern").chmod(0o755)
    command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(line.replace("--depth 8", ""))[1:], *TOY]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    flags = ["--data", "text.txt", "--out", "out"]
    done = subprocess.run([*command, *flags], env=env, cwd=tmp_path, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    saved = manifest.path_of(tmp_path / "out/runs/eight/pretrain/checkpoints", 2)
    assert len(list(saved.glob("*.safetensors"))) == 2, "a file of each rank"
    loaded, _ = checkpoint.load(saved)
    theirs = {name: torch.empty_like(tensor) for name, tensor in loaded.items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):  # PyTorch's own reader
        load(theirs, storage_reader=HuggingFaceStorageReader(str(saved)), no_dist=True)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in loaded.items()) and len(loaded) > 10
