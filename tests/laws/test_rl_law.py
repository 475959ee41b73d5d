"""Laws of reinforcement learning: the update does not depend on micro-batches or ranks, and what is sampled is what is
trained: a token's log-probability in sampling = in training."""

import numpy as np
import pytest
import torch

from quern.mesh import alone
from quern.parallel import buckets
from quern.rl.rollouts import Rollouts
from tests.laws.table import Law
from tests.rl.ranks import LETTERS, advanced, replies, rl_state, rollouts_of, updated
from tests.support.ranks import Ranks

BAR = 1e-5

pytestmark = pytest.mark.usefixtures("eager")


@pytest.mark.parametrize(("count", "tp", "updates"), [(3, 1, 1), (4, 2, 2)])
def test_n_ranks_are_one(count: int, tp: int, updates: int, ranks: Ranks, law: Law) -> None:
    worst = max(ranks(count, "tests.rl.ranks:updated", tp=tp, updates=updates))
    cut = f" (tp {tp})" if tp > 1 else ""
    law(f"RL, {count} ranks{cut} and other micro-batches = 1, {updates} updates a round: state", worst, BAR)


def test_shards_sample_the_same_replies(ranks: Ranks, law: Law) -> None:
    """And have the same rewards, even where a program rewards otherwise on another rank."""
    expected = [one for group in replies(alone()) for one in group]
    for found in ranks(2, "tests.rl.ranks:replies", tp=2, unequal=True):
        rows = [one for group in found for one in group]
        assert [row[:2] for row in rows] == [row[:2] for row in expected]
        worst = max(np.abs(np.subtract(row[2], one[2])).max() for row, one in zip(rows, expected, strict=True))
        law("RL, 2 shards = 1 rank: log-probabilities of the replies' tokens", worst, BAR, "nats")


def test_micro_batches_do_not_change_the_update(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SMALL_ELEMENTS", "LEAST_ELEMENTS"):  # `updated` changes them, for processes that end with it
        monkeypatch.setattr(buckets, name, getattr(buckets, name))
    worst = updated(alone())
    law("RL, other micro-batches: state after four updates", worst, BAR)


def gap(rollouts: Rollouts) -> float:
    items = [(LETTERS, LETTERS.ask(f"{number:06}")) for number in range(12)]
    rows = [one for group in rollouts.ask(items, 4, list(map(str, range(12)))) for one in group]
    trained = np.concatenate(rollouts.logprobs(rows))
    return float(np.abs(trained - np.concatenate([one.logprobs for one in rows])).max())


def test_log_probabilities_in_sampling_are_those_of_training(law: Law) -> None:
    state = rl_state(alone())
    rollouts = rollouts_of(state)
    worst = gap(rollouts)
    advanced(state, rollouts, alone(), 3)
    worst = max(worst, gap(rollouts))
    law("RL: log-probability of a token in sampling = in training, fp32", worst, BAR, "nats")
    rows = rollouts.ask([(LETTERS, LETTERS.ask("000001"))], 4, ["law"])[0]
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.mul_(1.01)
    other = np.concatenate(rollouts.logprobs(rows)) - np.concatenate([one.logprobs for one in rows])
    assert np.abs(other).max() > 100 * BAR  # of another model, they differ
