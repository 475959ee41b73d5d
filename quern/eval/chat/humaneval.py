"""HumanEval: functions to write from their docstrings. A reply is right if its program passes the tests in the sandbox.

Source: Chen et al., 2021, "Evaluating Large Language Models Trained on Code", https://arxiv.org/abs/2107.03374.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from quern.eval.chat.files import ProgramItem
from quern.eval.on_ranks import batched, is_main, on_ranks
from quern.eval.score import CONFIDENT, Score, prompt_hash
from quern.eval.task import Item
from quern.generate.engine import Engine
from quern.generate.sampling import Sampling
from quern.generate.sandbox import Program
from quern.mesh import ProcessGroup
from quern.rl.advantages import pass_at_k
from quern.rl.environments.programs import program_in
from quern.terminal import Meter

RunPrograms = Callable[[Sequence[Program]], Sequence[bool]]
"""Which of the programs pass."""

BASE_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""A base model's function ends before these, as in the paper."""
SAMPLING = Sampling(temperature=0.8, top_p=0.95)
"""Of pass@k, as in the paper for many samples."""
K = (1, 10, 100)


def program_of(item: Item, reply: str) -> Program:
    """The program of a reply, with its check.

    The program (`program_in`) is a whole function, or a body that continues the prompt. In both cases the prompt is
    before it, which has imports and functions that the tests use.
    """
    assert isinstance(item, ProgramItem)
    code = program_in(reply)
    whole = re.search(rf"^def {re.escape(item.entry_point)}\b", code, re.MULTILINE)
    name = item.entry_point
    check = f"{item.question}\n{name} = program.{name}\n{item.test}\ncheck({name})"
    return Program(f"{item.question}\n{code}" if whole else item.question + code, check)


def passed(items: Sequence[Item], replies: Sequence[str], run: RunPrograms) -> Sequence[bool]:
    """Whether each reply passes the tests of its item."""
    return run([program_of(item, reply) for item, reply in zip(items, replies, strict=True)])


def sampled_scores(
    engine: Engine,
    items: Sequence[Item],
    prompts: Sequence[list[int]],
    samples: int,
    *,
    run: RunPrograms,
    task: str,
    max_tokens: int,
    stop: Sequence[str] | None = None,
    group: ProcessGroup | None = None,
) -> tuple[list[Score], list[int]]:
    """pass@k of sampled replies, for each k of `K` up to their number, without bias.

    Args:
        engine: The model.
        items: The problems.
        prompts: Token ids of each item's prompt, from BOS on.
        samples: Replies to each problem.
        run: Runs the programs.
        task: The scores' name.
        max_tokens: The largest number of tokens of a reply.
        stop: The prompts are plain text, and a reply ends before any of these. None: the chat format.
        group: The ranks that ask some problems each; None is a single process.

    Returns:
        The scores, with intervals of 1.96 standard errors over the problems; the number of right replies to each item.
    """

    def compute(batch: Sequence[int]) -> list[int]:
        (at,) = batch
        (replies,) = engine.generate(
            [prompts[at]],
            samples=samples,
            max_tokens=max_tokens,
            sampling=SAMPLING,
            stop=stop or (),
            plain=stop is not None,
        )
        return [sum(passed([items[at]] * samples, [reply.text for reply in replies], run))]

    with Meter(f"{task}, {samples} samples", len(items), "problems", silent=not is_main(group)) as meter:
        right = on_ranks(batched(range(len(items)), 1), compute, group, meter.at)
    scores = []
    for k in (k for k in K if k <= samples):
        shares = np.array([pass_at_k(one, samples, k) for one in right])
        error, mean = CONFIDENT * float(shares.std()) / max(1, len(shares) - 1) ** 0.5, float(shares.mean())
        # Equal shares, such as all 0, say nothing about the spread.
        low, high = (max(0.0, mean - error), min(1.0, mean + error)) if error else (None, None)
        bos = all(prompt[0] == engine.tokenizer.bos for prompt in prompts)
        scores.append(Score(task, f"pass@{k}", mean, low, high, len(items), 0.0, prompt_hash(prompts), bos))
    return scores, right
