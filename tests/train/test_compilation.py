"""Compilation by block and of the loss, once: nothing after the first step, whatever is evaluated and sampled."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from quern import compiler
from quern.data.packing import windows
from quern.eval.bits_per_byte import bits_per_byte
from quern.generate.engine import Engine
from quern.kernels import cross_entropy
from quern.machine import Machine
from quern.recipe import Recipe, Resolved
from quern.recipes import gpt, unet
from quern.records import StageFolder
from quern.train import loop
from quern.train.state import TrainState, build_model, build_state
from quern.train.step import TorchBackend
from tests.support.toy_engine import toy_tokenizer
from tests.support.toy_training import CONTEXT, ROWS, toy_corpus, toy_loader, toy_plan, toy_recipe

# torch's tracer looks at `.grad` of tensors between two compiled parts, and warns of that itself.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
MACHINE = Machine(torch.device("cpu"), torch.float32, compile=True, threads=1)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    compiler.set_eager(False)
    yield
    torch.compiler.reset()


def recipe_of(source: Recipe, depth: int) -> Resolved:
    toy, tokenizer = toy_recipe(), toy_tokenizer()
    shape = replace(toy.model, depth=depth, vocab_size=tokenizer.vocab_size, bos=tokenizer.bos, kv_heads=2)
    shape = replace(shape, windows=source.model.windows)
    made = replace(toy, make_model=source.make_model, make_rules=source.make_rules, make_schedule=source.make_schedule)
    return Resolved.of(replace(made, depth=depth, model=shape))


# Kinds of blocks at a depth of eight, and the parts around them. gpt: windows S and L, with and without a value
# embedding, of which S without one, S with one and L with one occur; enter and leave. unet: with a skip and without,
# with a value embedding and without, no attention; enter, merge, leave. Both: the loss.
@pytest.mark.parametrize(("source", "most"), [(gpt.RECIPE, 6), (unet.RECIPE, 7)])
def test_nothing_is_compiled_after_the_first_step(
    source: Recipe, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, counter = recipe_of(source, 8), CompileCounter()
    loss: Any = cross_entropy._capped
    monkeypatch.setattr(cross_entropy, "_capped", torch.compile(loss.__wrapped__, backend=counter, dynamic=False))
    model = build_model(recipe, MACHINE, 0)
    model.compile(backend=counter, dynamic=False)
    state = build_state(recipe, replace(MACHINE, compile=False), model)
    engine = Engine(model, toy_tokenizer(), replace(MACHINE, compile=False))
    seen: list[int] = []

    def evaluate(state: TrainState) -> dict[str, float]:
        seen.append(counter.frame_count)
        length = 3 * state.step
        shapes = windows(toy_corpus(documents=4), length % CONTEXT + 1, rows=state.step, multiple=1)
        bits_per_byte(model, shapes, np.ones(recipe.model.vocab_size or 0, dtype=np.int32), MACHINE)
        prompts = [[toy_tokenizer().bos, *range(5, 5 + n)] for n in range(1, state.step + 1)]
        engine.generate(prompts, max_tokens=3, samples=state.step % 2 + 1)
        return {"graphs": counter.frame_count}

    # A window that grows, as in the recipe's own schedule, and micro-batches of one size.
    own = recipe.make_schedule(recipe.train)
    plan = toy_plan(3, micro_batch_rows=ROWS // 2, evaluators=[(1, evaluate)], schedule=own)
    with StageFolder(tmp_path) as folder:
        # a slow machine says that it waits for the first step; any other line is a fault
        reporter = loop.Reporter(lambda line: None if line.startswith("waiting") else pytest.fail(line))
        assert loop.train(TorchBackend(state, MACHINE), toy_loader(), plan, folder, reporter) == 0
    assert seen == [seen[0]] * 3 and counter.frame_count == seen[0], "something was compiled after the first step"
    assert 0 < seen[0] <= most
