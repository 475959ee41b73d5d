"""Replicas that start from different weights are refused and named: real commands on two ranks over gloo."""

import itertools

import pytest
import torch

from quern.train import manifest
from quern.train.state import checksum
from tests.parallel.test_faults import PRETRAIN, SHORT, lines_with
from tests.support.faulty_ranks import FaultyRanks

# One bit of one parameter, on rank 1; or of the optimizer's state that every replica has, after a resume.
RECIPE = """
import os
from dataclasses import replace
import torch
from quern.model.gpt import GPT
from quern.parallel.zero2 import Zero2
from quern.recipes.gpt import RECIPE as BASELINE

class Flipped(GPT):
    def initialize(self, seed):
        super().initialize(seed)
        if {part!r} == "weights" and os.environ["RANK"] == "1":
            with torch.no_grad():
                dict(self.named_parameters())[{name!r}].view(-1).view(torch.int32)[{at}] ^= 1

if {part!r} == "state" and os.environ.get("RANK") == "1":
    load = Zero2.load_state_tensors
    def load_flipped(self, tensors):
        load(self, tensors)
        small = next(bucket for bucket in self.buckets if bucket.small)
        next(iter(small.state.values())).view(-1).view(torch.int32)[-1] ^= 1
    Zero2.load_state_tensors = load_flipped

RECIPE = replace(BASELINE, name="flipped", make_model=Flipped)
"""
REFUSAL = "quern pretrain: the ranks do not start from equal weights: rank 1 differs from rank 0 in "


def pretrain(
    faulty_server: FaultyRanks, run: str, part: str = "", name: str = "", at: int = 0, flags: tuple = ()
) -> dict:
    path = faulty_server.folder / "flipped.py"
    path.write_text(RECIPE.format(part=part, name=name, at=at), encoding="utf-8")
    return faulty_server(["pretrain", str(path), *PRETRAIN[1:], *SHORT, "--run", run, *flags], restarts=1)


def test_one_bit_of_one_parameter_is_refused(faulty_server: FaultyRanks) -> None:
    found = pretrain(faulty_server, "bit", "weights", "blocks.1.mlp.down.weight", -1)
    assert found["exits"] == [[0, 0]] and found["result"] == 1, found
    (line,) = lines_with("quern pretrain:", found["said"])
    assert line.startswith(f"{REFUSAL}blocks.1.mlp.down.weight, of ") and "Nothing was trained: start the same" in line
    assert "Traceback" not in found["said"]
    assert not manifest.steps(faulty_server.folder / "out/runs/bit/pretrain/checkpoints")


def test_equal_replicas_train_and_state_that_differs_after_a_resume_is_refused(faulty_server: FaultyRanks) -> None:
    assert pretrain(faulty_server, "resumed")["result"] == 0
    found = pretrain(faulty_server, "resumed", "state", flags=("--resume", "--train.steps", "99"))
    assert found["exits"] == [[0, 0]] and found["result"] == 1, found["said"]
    assert f"{REFUSAL}m of " in found["said"], found["said"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_checksum_sees_every_bit_and_the_order(dtype: torch.dtype) -> None:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    generator, bits = torch.Generator().manual_seed(1), range(8 * dtype.itemsize - 1)
    tensor = torch.randint(-100, 100, (9,), generator=generator).to(integer).view(dtype)
    found = {checksum(tensor)}
    for at, bit in itertools.product((0, 4, 8), bits):
        changed = tensor.clone()
        changed.view(integer)[at] ^= 1 << bit
        found.add(checksum(changed))
    assert len(found) == 1 + 3 * len(bits)
    assert checksum(torch.stack([tensor, tensor.flip(0)], dim=1)[:, 0]) in found, "where it is stored does not matter"
    assert checksum(tensor.flip(0)) not in found
