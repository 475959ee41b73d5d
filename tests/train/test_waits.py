"""How often the host waits for the device in a training step, counted on a CPU through the real loop.

A machine without a GPU has nothing to wait for, so this counts the calls that would wait on one: reads of a tensor's
values, and tensors made on the device from values of the host. A read that was started before the step's one wait
(`Machine.read_later`) costs none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from quern import compiler
from quern.machine import Machine
from quern.mesh import Mesh, alone
from quern.records import Records
from quern.train import loop
from quern.train.state import build_model, build_state
from quern.train.step import TorchBackend
from tests.support.ranks import Ranks
from tests.support.toy_training import toy_loader, toy_plan, toy_recipe

STEPS = 6
TOLIST = torch.Tensor.tolist
READS = ("item", "tolist", "numpy", "cpu", "__int__", "__float__", "__bool__", "__index__")


@dataclass(frozen=True)
class CountingMachine(Machine):
    """A CPU on which `read_later` behaves as on a GPU: the values are there once the host has waited for the device."""

    waits: list[str] = field(default_factory=list)

    def read_later(self, tensor: torch.Tensor) -> Callable[[], list[Any]]:
        values, before = TOLIST(tensor), len(self.waits)

        def read() -> list[Any]:
            if len(self.waits) == before:
                self.waits.append("read too early")
            return values

        return read


@contextmanager
def counting() -> Iterator[CountingMachine]:
    machine = CountingMachine(torch.device("cpu"), torch.float32, compile=False, threads=1)

    def noted(name: str, call: Callable[..., Any], when: Callable[[dict[str, Any]], bool]) -> Callable[..., Any]:
        def note(*args: Any, **options: Any) -> Any:
            if when(options):
                caller = sys._getframe(1)
                machine.waits.append(f"{name} in {Path(caller.f_code.co_filename).name}, {caller.f_code.co_name}")
            return call(*args, **options)

        return note

    with pytest.MonkeyPatch.context() as patch:
        for name in (*READS, "new_tensor"):
            patch.setattr(torch.Tensor, name, noted(name, getattr(torch.Tensor, name), lambda options: True))
        patch.setattr(torch, "tensor", noted("tensor", torch.tensor, lambda options: "device" in options))
        yield machine


def waits(mesh: Mesh) -> list[list[str]]:
    """The waits of each step after the second, by which the ranks have agreed on the order of their buckets."""
    compiler.set_eager(True)
    recipe = toy_recipe()
    with counting() as machine:
        state = build_state(recipe, machine, build_model(recipe, machine, 0), mesh)
        ends: list[int] = []
        loop.train(
            TorchBackend(state, machine),
            toy_loader(masked=True, rows=7),  # one of two replicas has more micro-batches
            toy_plan(STEPS, save_every=None),
            Records(Path("unused")),
            loop.Reporter(lambda line: None, lambda *step: ends.append(len(machine.waits))),
        )
    assert len(ends) == STEPS
    return [machine.waits[first:last] for first, last in zip(ends[1:], ends[2:], strict=False)]


def test_a_process_waits_once_a_step() -> None:
    with compiler.eager():
        for step in waits(alone()):
            assert step == ["tolist in step.py, train_on"]


@pytest.mark.parametrize("zero", [2, 3])
def test_so_does_each_of_several_ranks(zero: int, ranks: Ranks) -> None:
    for found in ranks(2, "tests.train.test_waits:waits", zero=zero):
        for step in found:
            assert step == ["tolist in step.py, train_on"]
