"""Law: FP8 errs as much as its formats must, its emulation is the hardware's product, and only training sees it.

The oracle of the formats is ml_dtypes (tests/support/fp8_oracle.py). Rounding to m bits of mantissa leaves a relative
error of 2^-(m+1) / sqrt(3), times sqrt(0.541) because numbers spread evenly over the logarithm, so that most lie above
the power of two that their spacing belongs to: 0.0265 for E4M3, 0.0531 for E5M2. A product of random operands has the
root of the sum of their squares. An error larger or smaller than that means another arithmetic than the one described.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quern.data.loader import Loader
from quern.generate.cache import KVCache, decode, take_token
from quern.kernels.fp8 import E4M3, E5M2, fp8_linear, product, quantise
from quern.machine import Machine
from quern.model.base import loss_sum
from quern.model.fp8 import Fp8Linear, use_fp8
from quern.records import StageFolder, read_metrics
from quern.train.loop import Reporter, resume, train
from quern.train.state import TrainState, build_model, weights_of
from quern.train.step import TorchBackend, to_device, train_step
from tests.laws.table import Law
from tests.support import fp8_oracle as oracle
from tests.support.deviation import random, with_gradients
from tests.support.fp8_oracle import Format
from tests.support.models import CPU
from tests.support.toy_training import differing, toy_corpus, toy_loader, toy_plan, toy_recipe, toy_schedule, toy_state

pytestmark = pytest.mark.usefixtures("eager")

BF16 = replace(CPU, dtype=torch.bfloat16)
RECIPE = toy_recipe(model={"vocab_size": 64})  # a vocabulary that FP8 can multiply
CONTEXT = RECIPE.model.context


# Arithmetic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "of"), [(E4M3, oracle.E4M3), (E5M2, oracle.E5M2)], ids=["E4M3", "E5M2"])
def test_rounding_is_the_formats(dtype: torch.dtype, of: Format, law: Law) -> None:
    """From the smallest number to beyond the largest, each bf16 number and a million others."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    x = torch.cat([every[torch.isfinite(every)], random(10**6) * torch.exp2(10 * random(10**6, seed=1))])
    found = quantise(x, dtype, torch.tensor(1.0)).values.float().numpy()
    wrong = int((found != oracle.rounded(x.numpy(), of)).sum())
    law(f"{str(dtype)[6:]} = ml_dtypes', numbers rounded otherwise", wrong, unit="none")


def test_the_emulated_product_is_the_scaled_one(law: Law) -> None:
    """Up to the order of the sum. Where torch multiplies FP8, whatever the speed."""
    worst = 0.0
    for M, K, N in [(16, 16, 16), (1, 32, 48), (33, 64, 16)]:
        for kind in (E4M3, E5M2):
            a, b = quantise(random(M, K, std=3.0), kind), quantise(random(N, K, seed=1, std=0.1), E4M3)
            try:
                scaled = product(a, b, torch.float32, emulated=False)
            except (RuntimeError, NotImplementedError) as error:
                pytest.skip(f"torch multiplies no FP8 here: {error}")
            magnitudes = (a.values.double().abs() @ b.values.double().abs().t()) * (a.scale * b.scale)
            difference = (scaled - product(a, b, torch.float32, emulated=True)).abs().double()
            worst = max(worst, (difference / (2 * (K + 2) * 2.0**-24 * magnitudes + 1e-30)).max().item())
    law("FP8 product, emulated = torch._scaled_mm", worst, 1, "of both sums' rounding in fp32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_errs_as_predicted(dtype: torch.dtype, law: Law) -> None:
    """2-norms of the errors of y, dx and dW, relative to exact ones, over the errors predicted."""
    x, weight, grad = random(512, 256).to(dtype), random(384, 256, seed=1).to(dtype), random(512, 384, seed=2).to(dtype)
    found = with_gradients(lambda x, weight: fp8_linear(x, weight, True), (x, weight), grad)
    exact = [a.double() @ b.double() for a, b in ((x, weight.T), (grad, weight), (grad.T, x))]
    forward, gradient = (2.0**-m / math.sqrt(3) * math.sqrt(0.541) for m in (4, 3))
    predicted = [math.hypot(forward, forward), math.hypot(forward, gradient), math.hypot(forward, gradient)]
    for name, f, e, p in zip(("y", "dx", "dW"), found, exact, predicted, strict=True):
        ratio = ((f.double() - e).norm() / e.norm()).item() / p
        law(f"FP8 linear, {name}: its error over the formats', {str(dtype)[6:]}", ratio, bar="0.9 to 1.1")
        assert 0.9 <= ratio <= 1.1


def test_no_entry_errs_more_than_the_bound(law: Law) -> None:
    """Each operand t is off by at most unit · |t| + tiny · scale, so a product by what these make together."""
    worst = 0.0
    for std in (1.0, 1e-3):
        x, weight, grad = random(64, 48, std=std), random(32, 48, seed=1), random(64, 32, seed=2, std=1e-6)
        x[:8] *= 1e-4  # entries that become subnormal numbers
        y, dx, dweight = with_gradients(lambda x, weight: fp8_linear(x, weight, True), (x, weight), grad)
        formats = {"x": oracle.E4M3, "w": oracle.E4M3, "g": oracle.E5M2}
        exact = {"x": x.double().numpy(), "w": weight.double().numpy(), "g": grad.double().numpy()}
        off = {n: f.unit * abs(exact[n]) + f.tiny * oracle.scale_of(exact[n], f) for n, f in formats.items()}
        size = {name: abs(value) for name, value in exact.items()}
        for found, (a, b), turn in (
            (y, ("x", "w"), lambda p, q: p @ q.T),
            (dx, ("g", "w"), lambda p, q: p @ q),
            (dweight, ("g", "x"), lambda p, q: p.T @ q),
        ):
            bound = turn(off[a], size[b]) + turn(size[a], off[b]) + turn(off[a], off[b])
            bound += 1e-5 * turn(size[a], size[b])  # the sum in fp32
            worst = max(worst, float((abs(found.double().numpy() - turn(exact[a], exact[b])) / bound).max()))
    law("FP8 linear, every entry of y, dx, dW: its error over the bound", worst, 1)


# Training ---------------------------------------------------------------------------------------------------


def fp8_state(machine: Machine) -> TrainState:
    state = toy_state(RECIPE, machine)
    report = use_fp8(state.model)
    assert report.dynamic and report.static
    return state


def trained_loss(fp8: bool, seed: int, steps: int = 32, rows: int = 16) -> float:
    """Loss on held-out rows after training in bf16, with or without FP8, without a graph."""
    recipe = toy_recipe(model={"vocab_size": 64, "width": 64, "kv_heads": None}, steps=steps)
    state = toy_state(replace(recipe, seed=seed), BF16, moved=0.0)
    if fp8:
        use_fp8(state.model)
    loader, schedule = Loader(toy_corpus(documents=400), CONTEXT, rows, seed, "best-fit"), toy_schedule(steps)
    for step in range(steps):
        train_step(state, loader.batch(step), schedule(step), BF16, micro_batch_rows=rows)
    batch = Loader(toy_corpus(documents=400), CONTEXT, 128, 99, "best-fit").batch(0)
    with torch.no_grad():
        return loss_sum(state.model, *to_device(batch, int(batch.mask.sum()), BF16))[0].item()


def test_training_in_fp8_comes_to_nearly_the_same_loss(law: Law) -> None:
    """From 4.16 nats to 2.7; paired over seeds, which alone move the loss by a few thousandths."""
    ratios = [trained_loss(True, seed) / trained_loss(False, seed) for seed in range(2)]
    difference = float(np.mean(ratios)) - 1
    law("loss after 32 steps in FP8, relative to bf16's, mean of 2 seeds", abs(difference), 0.005)


def test_what_was_trained_in_fp8_evaluates_as_its_weights_do(law: Law) -> None:
    """Losses, logits and greedy decoding of the trained modules and of a plain model with the same weights."""
    for machine in (CPU, BF16):
        state = fp8_state(machine)
        loader, schedule = toy_loader(), toy_schedule(12)
        for step in range(4):
            train_step(state, loader.batch(step), schedule(step), machine, micro_batch_rows=4)
        plain = build_model(RECIPE, machine, None)
        plain.load_state_dict(weights_of(state.tensors()), strict=True)
        assert any(isinstance(m, Fp8Linear) for m in state.model.modules())
        assert not any(isinstance(m, Fp8Linear) for m in plain.modules())
        inputs, targets, _ = to_device(loader.batch(9), 1, machine)
        results = []
        for model in (state.model, plain):
            with torch.no_grad():
                x = model(inputs, model.context(inputs))
                losses = loss_sum(model, inputs, targets, torch.zeros(targets.shape))[1]
                results.append([x, losses, model.logits(x), greedy(model)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        with_graph = state.model(inputs, state.model.context(inputs))
        assert not torch.equal(with_graph, results[1][0]), "FP8 was not in use"
    law("trained in FP8, evaluated and decoded = the same weights in a plain model")


def greedy(model: torch.nn.Module, steps: int = 6) -> Tensor:
    """Logits of the tokens that greedy decoding chooses."""
    cache = KVCache(model, 2, CONTEXT)  # type: ignore[arg-type]
    tokens_BT, lengths_B = torch.tensor([[0, 3, 5], [0, 9, 0]]), torch.tensor([3, 2])
    x_BTD = cache.prefill(model, tokens_BT, lengths_B)  # type: ignore[arg-type]
    logits = [model.logits(take_token(x_BTD, lengths_B - 1))]  # type: ignore[operator]
    for _ in range(steps):
        logits.append(decode(model, cache, logits[-1].argmax(-1), torch.arange(CONTEXT)))  # type: ignore[arg-type]
    return torch.stack(logits)


def test_resumed_is_uninterrupted_in_fp8(tmp_path: Path, law: Law) -> None:
    """Scales hold no state: what a checkpoint has of a plain run is all that one of FP8 needs."""
    for machine in (CPU, BF16):
        runs = []
        for name, stops in (("whole", (6,)), ("parts", (2, 4, 6))):
            path = tmp_path / f"{name}-{machine.dtype}"
            for stop in stops:
                state = fp8_state(machine)
                plan = toy_plan(stop, schedule=toy_schedule(6), save_every=20)
                with StageFolder(path) as folder:
                    resume(TorchBackend(state, machine), folder.path / "checkpoints", print)
                    train(TorchBackend(state, machine), toy_loader(), plan, folder, Reporter(print))
            lines = [{k: line[k] for k in ("step", "loss", "grad_norm")} for line in read_metrics(path)]
            runs.append(({name: tensor.clone() for name, tensor in state.tensors().items()}, lines))
        (tensors, lines), (others, other_lines) = runs
        assert differing(tensors, others) == [] and lines == other_lines
    law("resumed = uninterrupted in FP8: losses and every tensor")
