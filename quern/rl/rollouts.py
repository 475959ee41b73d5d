"""Rollouts: replies that the model samples in training, as batches that the advantages of their rewards weight.

A batch is a pure function of (seed, step, weights), for any number of ranks: a resumed run samples the same replies.
Replies are sampled at temperature 1 from the whole vocabulary, so the sampled and the trained distribution agree. A
tool's output is read, and never learned. A question whose replies all got the same reward teaches nothing: it is
counted, left out of the batch, and replaced by another one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from quern.data.batch import Batch
from quern.eval.bits_per_byte import batch_losses
from quern.eval.task import Item
from quern.generate.engine import Engine
from quern.generate.reply import Completion
from quern.generate.sampling import Sampling
from quern.mesh import Mesh, alone
from quern.model.base import LanguageModel
from quern.recipe import RlRecipe
from quern.rl.environment import Environment, draw_item, reward_of
from quern.text.chat import render_prompt
from quern.train.step import evaluating

MULTIPLE = 64
"""Rows are padded to a multiple of this many tokens."""


@dataclass(frozen=True)
class Rollout:
    """A reply. Lists have one value for each token of the reply, except the prompt, which begins with BOS."""

    slot: int  # the number of its question in the batch of all ranks
    prompt: list[int]
    ids: list[int]
    sampled: list[bool]  # whether the model chose the token; a tool's output is forced
    logprobs: list[float]  # in sampling; in training where updates or the reference need them
    reward: float  # minus the penalty for its length
    right: bool
    truncated: bool
    weights: list[float] = field(default_factory=list)  # advantages; in a batch what `_weighted` makes of them
    reference: list[float] = field(default_factory=list)  # log-probabilities of the reference, if `kl` is above 0

    @property
    def span(self) -> slice:
        """The places of the row's targets that are the reply."""
        return slice(len(self.prompt) - 1, len(self.prompt) - 1 + len(self.ids))


def sums(group: Sequence[Rollout]) -> dict[str, float]:
    """Sums over the replies to a question, for `means`; without replies, it was too long for the context."""
    if not group:
        return {"too_long": 1}
    rewards = [one.reward for one in group]
    own = [value for one in group for value, own in zip(one.logprobs, one.sampled, strict=True) if own]
    return {
        "replies": len(group),
        "reward": sum(rewards),
        "squares": sum(reward**2 for reward in rewards),
        "right": sum(one.right for one in group),
        "truncated": sum(one.truncated for one in group),
        "tokens": len(own),
        "logprob": sum(own),
        "groups": 1,
        "dropped": is_uniform(np.array(rewards)),
    }


def means(totals: Counter[str]) -> dict[str, float]:
    """The recorded means. totals: added up `sums` of questions, over all ranks or those of one."""
    replies, tokens = max(1.0, totals["replies"]), max(1.0, totals["tokens"])
    mean = totals["reward"] / replies
    return {
        "reward": mean,
        "reward_std": max(0.0, totals["squares"] / replies - mean**2) ** 0.5,
        "pass_1": totals["right"] / replies,
        "dropped": totals["dropped"] / max(1.0, totals["groups"]),
        "entropy": -totals["logprob"] / tokens,
        "reply_tokens": totals["tokens"] / replies,
        "truncated": totals["truncated"] / replies,
        "too_long": float(totals["too_long"]),
    }


@dataclass(eq=False)
class Rollouts:
    """The batches of reinforcement learning."""

    ahead = False

    engine: Engine  # generates with the model in training
    environments: Sequence[Environment]  # where questions come from; they take turns
    settings: RlRecipe
    seed: int  # draws questions and replies
    micro_batch_rows: int  # rows of a whole context in one forward pass
    reference: LanguageModel | None = None  # the divergence is measured from it, if `settings.kl` is above 0
    mesh: Mesh = field(default_factory=alone)
    """The ranks. Those of its model axis sample the same replies; the first of them rewards them."""
    totals: Counter[str] = field(default_factory=Counter[str], init=False)
    """The added up `sums` of the questions of the newest round."""
    _round: int = field(default=-1, init=False)
    _kept: list[Rollout] = field(default_factory=list[Rollout], init=False)

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """This rank's replies of a step. A rank without a useful reply gets a row without targets.

        The first call for a round samples it, with the weights of then: resume at a round's first step.
        """
        updates = self.settings.updates
        number, part = divmod(step, updates)
        if number != self._round:
            self._kept, self._round = self._collect(number, rank, ranks), number
        order = np.random.default_rng((self.seed, number)).permutation(self.settings.groups)
        rows = [one for one in self._kept if order[one.slot] % updates == part]
        return self._batch(self._weighted(rows, later=part > 0))

    def refuse_unusable(self, environment: Environment) -> None:
        """Raises ValueError if an environment lacks questions of a split, or its questions do not fit the context."""
        items = [draw_item(environment, str(n), held_out=held_out) for held_out in (False, True) for n in range(20)]
        shortest = min(len(render_prompt(self.engine.tokenizer, item.messages)) for item in items)
        if shortest >= self.engine.context:
            raise ValueError(
                f"environment '{environment.name}': the questions tried have at least {shortest} tokens, and the "
                f"context has {self.engine.context}: ask shorter ones"
            )

    def ask(self, items: Sequence[tuple[Environment, Item]], samples: int, seeds: Sequence[str]) -> list[list[Rollout]]:
        """Samples replies to questions and rewards them. Questions too long for the context get no replies.

        Args:
            items: The questions, each with its environment.
            samples: Replies to each.
            seeds: For each question; equal questions of different seeds get different replies.
        """
        prompts = [render_prompt(self.engine.tokenizer, item.messages) for _, item in items]
        fits = [number for number, prompt in enumerate(prompts) if len(prompt) < self.engine.context]
        most, overlong = self.settings.max_tokens, self.settings.overlong_tokens
        how = {"samples": samples, "max_tokens": most, "sampling": Sampling(), "logprobs": 0}
        with evaluating(self.engine.model):
            digests = [hashlib.blake2b(seeds[at].encode(), digest_size=7).digest() for at in fits]
            own = [int.from_bytes(digest, "big") for digest in digests]
            done = self.engine.generate([prompts[number] for number in fits], seed=own, **how)
        groups: list[list[Rollout]] = [[] for _ in items]
        rewards = self._rewards([items[number] for number in fits], done)
        for number, replies, rewarded in zip(fits, done, rewards, strict=True):
            for reply, reward in zip(replies, rewarded, strict=True):
                net = reward - overlong_penalty(len(reply.ids), most, overlong)
                cut = reply.finish_reason == "length"
                known = (reply.ids, reply.sampled, reply.logprobs)
                groups[number].append(Rollout(number, prompts[number], *known, net, reward >= 1, cut))
        return groups

    def _rewards(
        self, items: Sequence[tuple[Environment, Item]], done: Sequence[Sequence[Completion]]
    ) -> list[list[float]]:
        """The rewards of the replies to each question, equal on all shards: a program may run out of time on one."""
        found: list[list[float]] | ValueError = []
        if self.mesh.model.rank == 0:
            pairs = zip(items, done, strict=True)
            try:
                found = [[reward_of(one, item, reply.text) for reply in replies] for (one, item), replies in pairs]
            except ValueError as error:
                found = error
        found = self.mesh.model.broadcast_object(found)
        if isinstance(found, ValueError):
            raise found
        return found

    def logprobs(self, rows: Sequence[Rollout], model: LanguageModel | None = None) -> list[np.ndarray]:
        """Log-probabilities of the replies' tokens, computed as in training. model: by default the one in training."""
        model, batch = model or self.engine.model, self._batch(rows)
        found: list[np.ndarray] = []
        with evaluating(model):
            for micro in batch.split(self.micro_batch_rows * max(1, self.engine.context // batch.tokens.shape[1])):
                found += list(-batch_losses(model, micro.tokens, micro.targets, self.engine.machine))
        return [values[one.span] for values, one in zip(found, rows, strict=False)]

    def _collect(self, number: int, rank: int, ranks: int) -> list[Rollout]:
        """Samples this rank's groups of a round. A group's question and replies do not depend on the rank."""
        settings = self.settings
        self.totals = Counter()
        waiting, kept = list(range(rank, settings.groups, ranks)), dict[int, list[Rollout]]()
        for attempt in range(settings.resample + 1):
            if not waiting:
                break
            seeds = [f"{self.seed}:{number}:{attempt}:{slot}" for slot in waiting]
            turns = [self.environments[(number * settings.groups + slot) % len(self.environments)] for slot in waiting]
            asked = [(one, draw_item(one, seed)) for one, seed in zip(turns, seeds, strict=True)]
            for slot, group in zip(waiting, self.ask(asked, settings.samples, seeds), strict=True):
                self.totals.update(sums(group))
                rewards = np.array([one.reward for one in group])
                if group and not is_uniform(rewards):
                    values = advantages(rewards, settings.normalize)
                    kept[slot] = [
                        replace(one, slot=slot, weights=[float(value)] * len(one.ids))
                        for one, value in zip(group, values, strict=True)
                    ]
            waiting = [slot for slot in waiting if slot not in kept]
        rows = [one for slot in sorted(kept) for one in kept[slot]]
        if rows and (settings.kl or settings.updates > 1):
            before = self.logprobs(rows)
            rows = [replace(one, logprobs=values.tolist()) for one, values in zip(rows, before, strict=True)]
        if rows and settings.kl:
            first = self.logprobs(rows, self.reference)
            rows = [replace(one, reference=values.tolist()) for one, values in zip(rows, first, strict=True)]
        return rows

    def _weighted(self, rows: Sequence[Rollout], later: bool) -> list[Rollout]:
        """The rows with their weights in this update: advantages, in a later update of the round with the clipped
        ratios, plus the pull: minus the derivative of `divergence` by the present model's log p, never clipped."""
        settings, found = self.settings, []
        present = self.logprobs(rows) if later and rows else [np.array(one.logprobs) for one in rows]
        for one, values in zip(rows, present, strict=True):
            weights = np.array(one.weights)
            if later:
                weights = clipped_ratios(values, np.array(one.logprobs), weights, settings.clip_low, settings.clip_high)
            if settings.kl:
                weights = weights + settings.kl * np.expm1(np.array(one.reference) - values)
            found.append(replace(one, weights=weights.tolist()))
        return found

    def _batch(self, rows: Sequence[Rollout]) -> Batch:
        """(B, T) arrays with one reply in each row."""
        context, bos = self.engine.context, self.engine.tokenizer.bos
        longest = max((one.span.stop for one in rows), default=1)
        width = min(context, -(-longest // MULTIPLE) * MULTIPLE)
        ids = np.full((max(1, len(rows)), width + 1), bos, dtype=np.int32)
        mask = np.zeros((len(ids), width), dtype=bool)
        weight = np.zeros((len(ids), width), dtype=np.float32)
        for row, one in enumerate(rows):
            ids[row, : one.span.stop + 1] = one.prompt + one.ids
            mask[row, one.span] = one.sampled
            weight[row, one.span] = one.weights or 0.0
        return replace(Batch.of_rows(ids, mask), weight=weight)


# Formulas ---------------------------------------------------------------------------------------------------

# A group is the replies to one question. The baseline of a reply is the mean reward of its group (REINFORCE with a
# group baseline: Shao et al., 2024, https://arxiv.org/abs/2402.03300). By default the difference is not divided by the
# standard deviation, which would give questions that are nearly always or nearly never answered a larger weight (Liu et
# al., 2025, "Dr. GRPO", https://arxiv.org/abs/2503.20783). The loss is a mean over all tokens of the global batch, not
# over replies (Yu et al., 2025, "DAPO", https://arxiv.org/abs/2503.14476).


def divergence(logprobs: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """An unbiased estimate, never negative, of each token's divergence KL(model ‖ reference) in nats.

    Source: Schulman, 2020, "Approximating KL Divergence" (k3), http://joschu.net/blog/kl-approx.html.
    """
    return np.expm1(reference - logprobs) - (reference - logprobs)


def advantages(rewards_S: np.ndarray, normalize: bool = False) -> np.ndarray:
    """The reward of each of S replies to a question minus their mean, float64 (S,).

    normalize: Also divide by their standard deviation.
    """
    deviation = rewards_S.std() if normalize else 1.0
    return (rewards_S - rewards_S.mean()) / deviation if deviation > 0 else np.zeros(len(rewards_S))


def is_uniform(rewards_S: np.ndarray) -> bool:
    """Whether all replies to a question got the same reward, so that none has an advantage."""
    return bool((rewards_S == rewards_S[0]).all())


def overlong_penalty(length: int, max_tokens: int, overlong_tokens: int) -> float:
    """The penalty of a reply of this length: 0 to 1 over the last `overlong_tokens` before `max_tokens` (DAPO §3.4)."""
    if not overlong_tokens:
        return 0.0
    return min(1.0, max(0.0, (length - (max_tokens - overlong_tokens)) / overlong_tokens))


def clipped_ratios(
    logprobs: np.ndarray, sampled_logprobs: np.ndarray, weights: np.ndarray, low: float, high: float
) -> np.ndarray:
    """The weights of tokens for an update of a model that has changed since it sampled them.

    The clipped objective min(r·A, clip(r, 1-low, 1+high)·A) has the gradient r·A·∇log p where it is not clipped and 0
    where it is (Schulman et al., 2017, https://arxiv.org/abs/1707.06347; two limits: DAPO §3.1). So the weights r·A of
    a plain policy gradient give exactly its gradient at the current model.

    weights: The tokens' advantages; low, high: how far the ratio may leave 1 before a token stops counting.
    """
    ratio = np.exp(logprobs - sampled_logprobs)
    clipped = ((weights > 0) & (ratio > 1 + high)) | ((weights < 0) & (ratio < 1 - low))
    return np.where(clipped, 0.0, ratio * weights)


def pass_at_k(right: int, samples: int, k: int) -> float:
    """The probability that at least one of k replies is right, estimated without bias from `samples` replies.

    Source: Chen et al., 2021, "Evaluating Large Language Models Trained on Code", https://arxiv.org/abs/2107.03374.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {samples} samples with {right} right is not defined")
    return 1.0 - float(np.prod(1.0 - k / np.arange(samples - right + 1, samples + 1)))
