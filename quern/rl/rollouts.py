"""Rollouts: replies that the model samples in training, with their rewards, as batches of the training loop.

A batch is a pure function of (seed, step, weights), for any number of ranks: a resumed run samples the same replies.
Replies are sampled at temperature 1 from the whole vocabulary, so the sampled and the trained distribution agree. A
tool's output is read, and never learned. A question whose replies all got the same reward teaches nothing: it is
counted, left out of the batch, and replaced by another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quern.data.batch import Batch
from quern.eval.task import Item
from quern.generate.engine import Engine
from quern.generate.reply import Completion
from quern.generate.sampling import Sampling
from quern.machine import Machine
from quern.mesh import ProcessGroup, alone
from quern.model.base import LanguageModel
from quern.model.loss import loss_sum
from quern.recipe import RlRecipe
from quern.records import read_json
from quern.rl.advantages import advantages, clipped_ratios, is_uniform, overlong_penalty
from quern.rl.environment import Environment, draw_item
from quern.temporaries import write_whole
from quern.text.chat import render_prompt

MULTIPLE = 64
"""Rows are padded to a multiple of this many tokens."""


@dataclass(frozen=True)
class Rollout:
    """A reply. Lists have one value for each token of the reply.

    Args:
        slot: The number of its question in the batch of all ranks.
        prompt: Token ids from BOS to the beginning of the reply.
        ids: Token ids of the reply.
        sampled: Whether the model chose the token; a tool's output is forced.
        logprobs: Log-probabilities in sampling; after `Rollouts` kept it for several updates, in training.
        reward: Of the environment, minus the penalty for its length.
        right: Whether the environment's reward is at least 1.
        truncated: Whether max_tokens or the context ended it.
        weights: Advantages.
    """

    slot: int
    prompt: list[int]
    ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    reward: float
    right: bool
    truncated: bool
    weights: list[float] = field(default_factory=list)


class Tally:
    """Sums over rollouts, which ranks add up."""

    NAMES = ("replies", "reward", "squares", "right", "truncated", "tokens", "logprob", "groups", "dropped", "too_long")

    def __init__(self) -> None:
        self.sums = dict.fromkeys(self.NAMES, 0.0)

    def add(self, group: Sequence[Rollout]) -> None:
        """Adds the replies to a question; without replies, the question was too long for the context."""
        sums = self.sums
        if not group:
            sums["too_long"] += 1
            return
        for one in group:
            sums["replies"] += 1
            sums["reward"] += one.reward
            sums["squares"] += one.reward**2
            sums["right"] += one.right
            sums["truncated"] += one.truncated
            sums["tokens"] += sum(one.sampled)
            sums["logprob"] += sum(value for value, own in zip(one.logprobs, one.sampled, strict=True) if own)
        sums["groups"] += 1
        sums["dropped"] += is_uniform(np.array([one.reward for one in group]))

    def means(self, sums: Sequence[float] | None = None) -> dict[str, float]:
        """What is recorded. sums: those of all ranks, in the order of NAMES; by default this rank's."""
        total = dict(zip(self.NAMES, sums, strict=True)) if sums is not None else self.sums
        replies, tokens = max(1.0, total["replies"]), max(1.0, total["tokens"])
        mean = total["reward"] / replies
        return {
            "reward": mean,
            "reward_std": max(0.0, total["squares"] / replies - mean**2) ** 0.5,
            "pass_1": total["right"] / replies,
            "dropped": total["dropped"] / max(1.0, total["groups"]),
            "entropy": -total["logprob"] / tokens,
            "reply_tokens": tokens / replies,
            "truncated": total["truncated"] / replies,
            "too_long": total["too_long"],
        }


@dataclass(frozen=True)
class _Kept:
    """The file that keeps a round's replies."""

    tally: dict[Any, float]
    rollouts: list[Rollout]


class Rollouts:
    """The batches of reinforcement learning.

    Args:
        engine: Generates with the model in training.
        environments: Where questions come from; they take turns.
        settings: Numbers of groups and samples, penalties, updates.
        seed: Of questions and replies.
        micro_batch_rows: Rows of a whole context in one forward pass.
        reference: The model that the divergence is measured from; needed if `settings.kl` is above 0.
        folder: Where the replies of a round are kept, if several updates use them.
        kept_steps: The steps of the checkpoints from which training can go on. Older rounds are removed.
        shards: The ranks among which tensor parallelism divides the model. All of them sample the same replies; the
            first one rewards them and keeps them.
    """

    ahead = False

    def __init__(
        self,
        engine: Engine,
        environments: Sequence[Environment],
        settings: RlRecipe,
        seed: int,
        *,
        micro_batch_rows: int,
        reference: LanguageModel | None = None,
        folder: Path | None = None,
        kept_steps: Callable[[], Sequence[int]] = tuple,
        shards: ProcessGroup | None = None,
    ) -> None:
        if settings.kl and reference is None:
            raise ValueError("a weight of the divergence needs the model that it is measured from")
        self.engine, self.environments, self.settings, self.seed = engine, environments, settings, seed
        self.micro_batch_rows, self.reference, self.folder = micro_batch_rows, reference, folder
        self.kept_steps, self.shards = kept_steps, shards or alone().model
        self.tally = Tally()
        self._round, self._kept = -1, []

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """This rank's replies of a step. A rank without a useful reply gets a row without targets."""
        updates = self.settings.updates
        number, part = divmod(step, updates)
        if number != self._round:
            self._kept = self._read(number, rank, ranks) if part else self._collect(number, rank, ranks)
            self._round = number
        if updates == 1:
            return self._batch(self._kept)
        order = np.random.default_rng((self.seed, number)).permutation(self.settings.groups)
        rows = [one for one in self._kept if order[one.slot] % updates == part]
        return self._batch(self._with_ratios(rows) if part else rows)

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
        settings = self.settings
        model = self.engine.model
        training = model.training
        model.eval()
        done = self.engine.generate(
            [prompts[number] for number in fits],
            samples=samples,
            max_tokens=settings.max_tokens,
            sampling=Sampling(),
            seed=[_number(seeds[at]) for at in fits],
            logprobs=True,
        )
        model.train(training)
        groups: list[list[Rollout]] = [[] for _ in items]
        rewards = self._rewards([items[number] for number in fits], done)
        for number, replies, rewarded in zip(fits, done, rewards, strict=True):
            for reply, reward in zip(replies, rewarded, strict=True):
                penalty = overlong_penalty(len(reply.ids), settings.max_tokens, settings.overlong_tokens)
                one = Rollout(
                    number,
                    prompts[number],
                    reply.ids,
                    reply.sampled,
                    reply.logprobs,
                    reward - penalty,
                    reward >= 1,
                    reply.finish_reason == "length",
                )
                groups[number].append(one)
        return groups

    def _rewards(
        self, items: Sequence[tuple[Environment, Item]], done: Sequence[Sequence[Completion]]
    ) -> list[list[float]]:
        """The rewards of the replies to each question, equal on all shards: a program may run out of time on one."""
        found: list[list[float]] = []
        if self.shards.rank == 0:
            for (environment, item), replies in zip(items, done, strict=True):
                found.append([float(environment.reward(item, reply.text)) for reply in replies])
        found = self.shards.broadcast_object(found)
        for (environment, _), rewards in zip(items, found, strict=True):
            for reward in rewards:
                if not np.isfinite(reward):
                    raise ValueError(f"environment '{environment.name}' gave the reward {reward}: give a finite number")
        return found

    def logprobs(self, rows: Sequence[Rollout], model: LanguageModel | None = None) -> list[np.ndarray]:
        """Log-probabilities of the replies' tokens, computed as in training. model: by default the one in training."""
        model = model or self.engine.model
        machine: Machine = self.engine.machine
        training = model.training
        model.eval()
        found: list[np.ndarray] = []
        batch = self._batch(rows)
        for micro in batch.split(self.micro_batch_rows * max(1, self.engine.context // batch.tokens.shape[1])):
            tokens, targets = (torch.from_numpy(a).long().to(machine.device) for a in (micro.tokens, micro.targets))
            with torch.no_grad():
                zeros = torch.zeros(targets.shape, device=machine.device)
                nats = loss_sum(model, tokens, targets, zeros, attention=machine.attention)[1]
            found += list(-nats.float().cpu().numpy())
        model.train(training)
        spans = ((len(one.prompt) - 1, len(one.prompt) - 1 + len(one.ids)) for one in rows)
        return [values[first:last] for values, (first, last) in zip(found, spans, strict=False)]

    def _collect(self, number: int, rank: int, ranks: int) -> list[Rollout]:
        """Samples this rank's groups of a round. A group's question and replies do not depend on the rank."""
        settings = self.settings
        self.tally = Tally()
        waiting, kept = list(range(rank, settings.groups, ranks)), {}
        for attempt in range(settings.resample + 1):
            seeds = [f"{self.seed}:{number}:{attempt}:{slot}" for slot in waiting]
            asked = [self._question(number, slot, seed) for slot, seed in zip(waiting, seeds, strict=True)]
            for slot, group in zip(waiting, self.ask(asked, settings.samples, seeds), strict=True):
                self.tally.add(group)
                if group and not is_uniform(np.array([one.reward for one in group])):
                    kept[slot] = self._weighted(slot, group)
            waiting = [slot for slot in waiting if slot not in kept]
            if not waiting:
                break
        rows = [one for slot in sorted(kept) for one in kept[slot]]
        if settings.kl and rows:
            rows = self._with_divergence(rows)
        if settings.updates > 1:
            before = self.logprobs(rows) if rows else []
            rows = [replace(one, logprobs=values.tolist()) for one, values in zip(rows, before, strict=True)]
            self._write(number, rank, ranks, rows)
        return rows

    def _question(self, number: int, slot: int, seed: str) -> tuple[Environment, Item]:
        environment = self.environments[(number * self.settings.groups + slot) % len(self.environments)]
        return environment, draw_item(environment, seed)

    def _weighted(self, slot: int, group: Sequence[Rollout]) -> list[Rollout]:
        values = advantages(np.array([[one.reward for one in group]]), self.settings.normalize)[0]
        return [
            replace(one, slot=slot, weights=[float(value)] * len(one.ids))
            for one, value in zip(group, values, strict=True)
        ]

    def _with_divergence(self, rows: Sequence[Rollout]) -> list[Rollout]:
        """Adds the gradient of the divergence from the reference (`divergence`) to the weights."""
        found = []
        for one, values, reference in zip(rows, self.logprobs(rows), self.logprobs(rows, self.reference), strict=True):
            pull = self.settings.kl * np.expm1(reference - values)  # minus the derivative of k3 by log p
            found.append(replace(one, weights=(np.array(one.weights) + pull).tolist()))
        return found

    def _with_ratios(self, rows: Sequence[Rollout]) -> list[Rollout]:
        found = []
        for one, values in zip(rows, self.logprobs(rows) if rows else [], strict=True):
            before, weights = np.array(one.logprobs), np.array(one.weights)
            new = clipped_ratios(values, before, weights, self.settings.clip_low, self.settings.clip_high)
            found.append(replace(one, weights=new.tolist()))
        return found

    def _batch(self, rows: Sequence[Rollout]) -> Batch:
        """(B, T) arrays with one reply in each row."""
        context, bos = self.engine.context, self.engine.tokenizer.bos
        longest = max((len(one.prompt) + len(one.ids) - 1 for one in rows), default=1)
        width = min(context, -(-longest // MULTIPLE) * MULTIPLE)
        ids = np.full((max(1, len(rows)), width + 1), bos, dtype=np.int32)
        mask = np.zeros((len(ids), width), dtype=bool)
        weight = np.zeros((len(ids), width), dtype=np.float32)
        for row, one in enumerate(rows):
            first, last = len(one.prompt) - 1, len(one.prompt) - 1 + len(one.ids)
            ids[row, : last + 1] = one.prompt + one.ids
            mask[row, first:last] = one.sampled
            weight[row, first:last] = one.weights or 0.0
        return replace(Batch.of_rows(ids, mask), weight=weight)

    def _path(self, number: int, rank: int, ranks: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{number:06}.{rank}-of-{ranks}.json"

    def _write(self, number: int, rank: int, ranks: int, rows: Sequence[Rollout]) -> None:
        """Keeps a round's replies: a run that stops between two updates needs them, and their model is gone."""
        if self.folder is not None and self.shards.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            body = {"tally": self.tally.sums, "rollouts": [asdict(one) for one in rows]}
            write_whole(self._path(number, rank, ranks), json.dumps(body))
            oldest = min((step for step in self.kept_steps() if step), default=0) // self.settings.updates
            for path in self.folder.glob(f"*.{rank}-of-{ranks}.json"):
                if int(path.name.partition(".")[0]) < oldest:
                    path.unlink()

    def _read(self, number: int, rank: int, ranks: int) -> list[Rollout]:
        if self.folder is None or not self._path(number, rank, ranks).exists():
            raise ValueError(
                f"the replies of round {number} are not kept for {ranks} ranks: continue with as many ranks as before"
            )
        body = read_json(self._path(number, rank, ranks), _Kept, "continue from an earlier checkpoint")
        self.tally.sums = body.tally
        return body.rollouts


def _number(seed: str) -> int:
    return int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=7).digest(), "big")


def divergence(logprobs: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """An unbiased estimate, never negative, of each token's divergence KL(model ‖ reference) in nats.

    Source: Schulman, 2020, "Approximating KL Divergence" (k3), http://joschu.net/blog/kl-approx.html.
    """
    return np.expm1(reference - logprobs) - (reference - logprobs)
