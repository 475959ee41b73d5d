"""The contracts that every file of experiments/ must keep, at toy size; a new idea is covered by being there.

The contracts of the model alone run once for all ideas that have the same model, resuming and two ranks once for all
that have the same code and differ in numbers.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from quern.generate.cache import KVCache, decode
from quern.kernels.attention.attend import MaskSpec, attend_in_blocks, visible
from quern.model.base import loss_sum
from quern.model.count import FlopCounter, count, weightless
from quern.model.gpt import GPT
from quern.optim.groups import make_groups
from quern.optim.schedule import Multipliers
from quern.recipe import Resolved
from quern.resolve import resolve
from quern.train.state import build_model
from quern.train.step import train_step
from tests.contracts import idea
from tests.contracts.idea import EXPERIMENTS, batches_of, first_with_its_code, idea_files, read, state_of, toy, trained
from tests.support.batches import token_hash
from tests.support.ranks import Ranks
from tests.support.toy_training import CPU

pytestmark = pytest.mark.usefixtures("eager")

SECTIONS = re.compile(r'"""[^\n]+\.\n\nHypothesis: .+\nSource: .+\nExpected effect: .+\nVerdict: .+', re.DOTALL)
PARTS = 4
"""Calls that train the ideas on two ranks."""


def test_every_file_is_in_the_index() -> None:
    index = (EXPERIMENTS / "README.md").read_text(encoding="utf-8")
    for folder in ("", "grug/"):
        rows = re.findall(rf"^\| \[(\w+)\.py\]\({folder}\1\.py\)", index, re.MULTILINE)
        assert sorted(rows) == sorted(path.stem for path in (EXPERIMENTS / folder).glob("*.py"))
    assert {"baseline", "bigram", "swiglu"} <= set(idea_files())


@pytest.mark.parametrize("name", sorted({*idea_files()} - {"baseline"}))
def test_it_is_short_and_says_what_it_expects(name: str) -> None:
    source = (EXPERIMENTS / f"{name}.py").read_text(encoding="utf-8")
    assert SECTIONS.match(source) and source.count("\n") <= 150
    assert read(name).name == name


@pytest.mark.parametrize("name", idea_files())
def test_it_trains_and_every_parameter_moves(name: str) -> None:
    run = trained(name)
    assert all(torch.tensor(run.losses).isfinite()) and min(run.losses[1:]) < run.losses[0], run.losses
    still = [key for key, p in run.before.items() if torch.equal(p, run.after[f"parameter.{key}"])]
    assert still == []


def test_it_is_built_and_counted_at_full_size() -> None:
    """At the file's own depth and at a larger one: every parameter has a group, and every group a kind and a rule."""
    seen = set()
    for name, depth in product(idea_files(), (None, 12)):
        recipe = resolve(replace(read(name), depth=depth or read(name).depth))
        key = recipe.make_model, recipe.model, recipe.make_rules
        if key not in seen:
            model = weightless(recipe)
            assert count(model).total > 0, name
            make_groups(model.parameter_groups(), recipe.make_rules(recipe), model.named_parameters())
        seen.add(key)


FOUND: dict[Any, float] = {}


def found_by(check: Callable[[Resolved], float], name: str, *fields: str) -> float:
    """The result of a check, which is the same for recipes that are equal in these fields."""
    key = check, *(getattr(toy(name), field) for field in fields)
    if key not in FOUND:
        FOUND[key] = check(toy(name))
    return FOUND[key]


def cached_apart(recipe: Resolved) -> float:
    """Largest difference of logits: a prompt in two parts, then token by token, against whole rows of one document."""
    model = state_of(recipe).model.eval()
    ids = torch.from_numpy(batches_of(replace(recipe, make_batches=None)).batch(0).tokens[:3]).long()
    ids[:, 1:] = ids[:, 1:].clamp(min=1)  # the BOS is 0
    with torch.inference_mode():
        whole = model.logits(model(ids, model.context(ids)))
        cache = KVCache(model, len(ids), ids.size(1))
        found = []
        for part in (ids[:, :5], ids[:, 5:7]):
            x_BTD = cache.prefill(model, part, torch.full((len(ids),), part.size(1)))
            found.append(model.logits(x_BTD[:, -1]))
        for at in range(7, ids.size(1)):
            found.append(decode(model, cache, ids[:, at], torch.arange(ids.size(1))))
    expected = [whole[:, 4], whole[:, 6], *whole[:, 7:].unbind(1)]
    return max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", idea_files())
def test_cached_is_uncached(name: str) -> None:
    assert found_by(cached_apart, name, "make_model", "model") <= 1e-5


def evaluation_apart(recipe: Resolved) -> float:
    """Largest difference in nats between the losses of evaluation and those of the logits."""
    model, batch = state_of(recipe).model.eval(), batches_of(replace(recipe, make_batches=None)).batch(0)
    ids, targets = (torch.from_numpy(array).long() for array in (batch.tokens, batch.targets))
    with torch.no_grad():
        _, found = loss_sum(model, ids, targets, torch.zeros(ids.shape))
        logits = model.logits(model(ids, model.context(ids)))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(ids.shape)
    return ((found - expected).abs() / (1 + expected.abs())).max().item()


@pytest.mark.parametrize("name", idea_files())
def test_the_loss_of_evaluation_is_that_of_the_logits(name: str) -> None:
    assert found_by(evaluation_apart, name, "make_model", "model") <= 1e-5


def test_prefixes_are_predicted_beside_the_next_token() -> None:
    model = state_of(toy("prefix_token")).model
    model.read_vocabulary([b"", b"a", b"ab", b"b", b"abc!", b"\xff"])
    assert model.prefixes_V[:6].tolist() == [-1, -1, 1, -1, 2, -1]
    ids, targets = torch.tensor([[0, 1, 3, 4]]), torch.tensor([[1, 2, 4, 5]])
    found, _ = loss_sum(model, ids, targets, torch.ones(ids.shape), progress=1 / 3)
    nats = -model.logits(model(ids, model.context(ids))).log_softmax(-1)[0]
    expected = nats[range(4), targets[0]].sum() + 0.1 * (nats[1, 1] + nats[2, 2])  # half of 0.2, of two thirds
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("progress", "weights"),  # nanochat's log: 1, 0.5, 0.25 → 0 in the first third; 1, 0.5 → 0 in the second; then 1
    [(0, (4, 2, 1)), (1 / 6, (8, 4, 1)), (1 / 3, (2, 1, 0)), (0.5, (4, 1, 0)), (2 / 3, (1, 0, 0)), (1, (1, 0, 0))],
)
def test_further_tokens_weigh_what_they_do_in_the_log(progress: float, weights: tuple[int, int, int]) -> None:
    model, ids = state_of(toy("multi_token")).model, torch.tensor([[0, 1, 3, 4, 2]])
    found, _ = loss_sum(model, ids[:, :-1], ids[:, 1:], torch.ones(1, 4), progress=progress)
    nats = -model.logits(model(ids[:, :-1], model.context(ids[:, :-1]))).log_softmax(-1)[0]
    ahead = [sum(nats[at, ids[0, at + 1 + further]] for at in range(4 - further)) for further in range(3)]
    expected = sum(weight * loss for weight, loss in zip(weights, ahead, strict=True)) / sum(weights)
    torch.testing.assert_close(found, expected)


def test_the_rates_of_a_growing_batch_are_the_baselines_at_its_size() -> None:
    recipe = replace(read("growing_batch"), train=replace(toy("growing_batch").train, steps=9))
    ours, baseline = (one.make_schedule(recipe.train) for one in (recipe, read("baseline")))
    batches, counted = batches_of(replace(toy("growing_batch"), train=recipe.train)), list[int]()
    for step in range(9):
        rows = len(batches.batch(step).tokens)
        counted.append(rows * 2 // batches.batch_rows)
        sized = replace(toy("baseline"), depth=2, optim=read("baseline").optim)
        steady, grown = (
            resolve(replace(sized, train=replace(sized.train, batch_tokens=tokens))).optim.lr_scale
            for tokens in (batches.batch_rows * batches.context, rows * batches.context)
        )
        assert steady and grown and (3 * rows) % batches.batch_rows in (0, batches.batch_rows // 2)
        expected, found = grown / steady, ours(step)
        assert found.lr / baseline(step).lr == pytest.approx(expected)
        assert found.groups and found.groups["head"] * expected == pytest.approx(expected**0.5)
    assert counted == [1, 1, 1, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("name", ["bigram", "bigram_decay", "bigram_early"])
def test_pairs_have_the_logs_hash(name: str) -> None:
    """Worked out by hand for 305 rows: 36,313 · 3 xor 27,191 · 5 is 244,376, and 244,376 mod 304 is 264."""
    model = cast(Any, state_of(toy(name)).model)
    assert model.bigrams.num_embeddings == 305
    row_of = model.bigram_rows if name == "bigram_decay" else model.row_of
    assert row_of(torch.tensor([[9, 3]]), torch.tensor([[-1, 5]])).tolist() == [[304, 264]]


@pytest.mark.parametrize("name", idea_files())
def test_saved_and_loaded_it_goes_on_bit_for_bit(name: str) -> None:
    assert idea.resumed_apart(first_with_its_code(name)) == []


@pytest.mark.parametrize("part", range(PARTS))
def test_two_ranks_are_one(part: int, ranks: Ranks, tmp_path: Path) -> None:
    names = sorted({first_with_its_code(name) for name in idea_files()})[part::PARTS]
    for name in names:
        torch.save(trained(name).saved, tmp_path / name)
    for found in ranks(2, f"{idea.__name__}:apart_on_ranks", names=names, folder=str(tmp_path)):
        assert {name: apart for name, apart in found.items() if isinstance(apart, str) or apart > 1e-5} == {}


@pytest.mark.parametrize("name", idea_files())
def test_the_other_weights_start_as_in_the_baseline(name: str) -> None:
    """Seeds stay paired: what an idea adds leaves every other initial value as it was."""
    theirs, ours = initialised(GPT, toy("baseline").model), initialised(toy(name).make_model, toy(name).model)
    shared = [key for key, p in ours.items() if key in theirs and p.shape == theirs[key].shape]
    assert "embedding.weight" in shared
    changed = {key for key in shared if not torch.equal(ours[key], theirs[key])}
    patterns = idea.own_initial_values(name)
    assert [key for key in changed if not any(fnmatchcase(key, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(fnmatchcase(key, pattern) for key in changed)] == []
    narrow = initialised(toy(name).make_model, toy(name).model, torch.bfloat16)  # as a study starts a model again
    assert [key for key, p in ours.items() if (narrow[key].float() - p).norm() > 2**-7 * p.norm()] == []


@cache
def initialised(make_model: Any, shape: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = make_model(shape).to(dtype)
    model.initialize(3)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", idea_files())
def test_another_data_seed_gives_other_batches(name: str) -> None:
    """`--from` reads the documents in a new order by this seed."""
    recipe = toy(name)
    one, same, other = (token_hash(batches_of(replace(recipe, data_seed=seed)), 0) for seed in (0, 0, 1))
    assert one == same != other


def test_the_documents_are_some_of_the_texts_in_order() -> None:
    texts = ["short", "a longer text. " * 20, "", "The miller and the baker have bread to sell. " * 8]
    makers: dict[str, Any] = {name: read(name).make_documents for name in idea_files() if read(name).make_documents}
    assert makers
    for name, make in makers.items():
        for split in ("train", "val"):
            kept, again = list(make(iter(texts), split)), list(make(iter(texts), split))
            assert kept == again and kept == [text for text in texts if text in kept] and kept, name


def test_a_lookback_that_is_not_declared_is_refused() -> None:
    recipe = toy("bigram")
    with pytest.raises(ValueError, match="looks 1 tokens back and declares 0: set its `lookback`"):
        cached_apart(replace(recipe, make_model=type("Undeclared", (cast(Any, recipe.make_model),), {"lookback": 0})))


def flops_apart(recipe: Resolved) -> float:
    """Largest relative difference to a real pass: products by torch's counter, attention by a dense mask."""
    model, batch = build_model(recipe, CPU, recipe.seed), batches_of(replace(recipe, make_batches=None)).batch(0)
    model.read_vocabulary(idea.TOKENS)
    tokens, targets = (torch.from_numpy(array).long() for array in (batch.tokens, batch.targets))
    seen, progress = Seen(), 0.1  # further losses end later in a run
    with FlopCounterMode(display=False) as real:
        loss_sum(model, tokens, targets, torch.ones(tokens.shape), progress, seen)[0].backward()
    found = FlopCounter(recipe)(batch, progress)
    return max(abs(found.products / real.get_total_flops() - 1), abs(found.attention - seen.flops))


@pytest.mark.parametrize("name", idea_files())
def test_its_flops_are_those_of_a_real_pass(name: str) -> None:
    assert found_by(flops_apart, name, "make_model") <= 0.01


def test_the_flops_of_updates_are_those_of_real_steps() -> None:
    """Once for all ideas with the same rules."""
    recipes = {toy(name).make_rules: toy(name) for name in idea_files()}
    for recipe in recipes.values():
        state, batch = state_of(recipe), batches_of(recipe).batch(0)
        with FlopCounterMode(display=False) as real:
            train_step(state, batch, Multipliers(progress=0.1), CPU, micro_batch_rows=16)
        found = FlopCounter(recipe)(batch, 0.1)
        assert found.products + found.update == pytest.approx(real.get_total_flops()), recipe.name
        assert (found.update > 0) == any(bucket.rule.stacked for bucket in state.optimizer.buckets)


class Seen:
    """Attention on the CPU, which torch's counter does not see, and the FLOPs of the pairs that a dense mask shows."""

    def __init__(self) -> None:
        self.flops = 0

    def attend(
        self, q_BTHE: torch.Tensor, k_BTKE: torch.Tensor, v_BTKE: torch.Tensor, mask: MaskSpec, scale: Any = None
    ) -> torch.Tensor:
        B, T, H, E = q_BTHE.shape
        self.flops += 3 * 2 * H * (E + v_BTKE.size(3)) * int(visible(T, mask, q_BTHE.device).expand(B, 1, T, T).sum())
        return attend_in_blocks(q_BTHE, k_BTKE, v_BTKE, mask, scale)
