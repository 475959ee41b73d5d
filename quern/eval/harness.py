"""A quern model for lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness).

`LM("out/runs/first")` is the model of `lm_eval.simple_evaluate(model=…, tasks=[…])`; `run_harness` is `quern evaluate
--harness`. Requests are scored by CORE's scorer: those under one context share its cache. Prompts begin with BOS, and
one that is too long is cut from the left. Tasks from the hub need the network. Units: nats.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quern.eval.likelihood import Example, fit, score_examples
from quern.eval.score import Score, interval, wilson
from quern.generate.engine import Engine
from quern.generate.sampling import GREEDY, Sampling
from quern.machine import Machine, detect
from quern.runs.load import LoadedModel, load
from quern.runs.run_dir import RunDir
from quern.terminal import Meter
from quern.validate import extra

with extra("eval", "lm-evaluation-harness needs extra packages"):
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]

Pair = tuple[Any, list[int], list[int]]
"""A request as lm-eval encodes it: its texts or None, the ids of the context, the ids of the continuation."""
MAX_TOKENS = 256
"""The length of a generated answer whose task names no number; lm-eval's default."""
SHARES = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match")
"""Metrics that are a share of right answers; some tasks count an answer as partly right."""


class LM(TemplateLM):
    """A model for lm-eval.

    Args:
        run: The folder of a run (out/runs/NAME), or a loaded model.
        machine: The machine that computes. Default: as `detect` decides, without compilation.
        stage: The stage of a run's folder: pretrain, sft or rl. Default: the last one.
    """

    def __init__(self, run: str | Path | LoadedModel, machine: Machine | None = None, stage: str | None = None) -> None:
        super().__init__()
        self.machine = machine or detect(compile=False)
        if not isinstance(run, LoadedModel):
            folder = Path(run)
            run = load(RunDir(folder.parent.parent, folder.name), self.machine, print, stage)
        self.model = run.model
        self.text = run.tokenizer
        self.context = int(run.model.shape.context or 0)
        self._device = self.machine.device

    @property
    def eot_token_id(self) -> int:
        """BOS, which begins every document, ends the one before."""
        return self.text.bos

    @property
    def max_length(self) -> int:
        """The most tokens that the model reads."""
        return self.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text, from BOS on unless add_special_tokens is False. Names of special tokens are text."""
        return [*([] if add_special_tokens is False else [self.text.bos]), *self.text.encode(string)]

    def _loglikelihood_tokens(self, requests: list[Pair], **kwargs: Any) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether each of its tokens is the likeliest one."""
        groups = [list(group) for _, group in itertools.groupby(requests, key=lambda request: request[1])]
        examples = [self._example(group) for group in groups]
        with Meter("lm-eval", len(examples), "questions") as meter:
            answers = score_examples(self.model, examples, self.machine, self.text.vocab_size, meter.at)
        return [
            (-float(loss), greedy)
            for example, answer in zip(examples, answers, strict=True)
            for loss, greedy in zip(answer.nats(example), answer.greedy, strict=True)
        ]

    def _example(self, group: Sequence[Pair]) -> Example:
        """Requests under one context, as the rows of one example."""
        bos = [self.text.bos]  # older lm-eval puts it before a continuation without a context, where text never has it
        group = [(text, context, ids[1:] if ids[:1] == bos else ids) for text, context, ids in group]
        for request, _, continuation in group:
            if not continuation:
                raise ValueError(f"a continuation is empty: leave out its task ({str(request)[:80]})")
            if len(continuation) > self.context:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens, and the context is {self.context}: leave out its "
                    f"task, or take a model with a longer context ({str(request)[:80]})"
                )
        rows = [(*context, *continuation) for _, context, continuation in group]
        example = fit(rows, [len(context) for _, context, _ in group], 0, self.context)
        assert example is not None  # every continuation fits
        return example

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text. A long one is cut into windows; each token is predicted once."""
        pairs, counts = [], []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.context, 1)
            pairs += [(None, *make_disjoint_window(window)) for window in windows]
            counts.append(len(pairs))
        scores = [score for score, _ in self._loglikelihood_tokens(pairs)]
        return [sum(scores[first:last]) for first, last in zip([0, *counts], counts, strict=False)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """A completion of each prompt, up to a stop string, a special token or the task's number of tokens.

        A prompt that leaves less room than that number and less than half of the context is cut from the left.
        """
        engine = Engine(self.model, self.text, self.machine)
        texts = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for at, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(at)
        for key, places in alike.items():
            options = json.loads(key)
            stop = options.get("until") or []
            room = int(options.get("max_gen_toks", MAX_TOKENS))
            most = self.context - min(room, self.context // 2)
            prompts = {at: self.tok_encode(requests[at].args[0])[-most:] for at in places}
            order = sorted(places, key=lambda at: len(prompts[at]))  # rows of a batch are padded to the longest
            done = engine.generate(
                [prompts[at] for at in order],
                max_tokens=room,
                sampling=_sampling(options),
                stop=[text for text in ([stop] if isinstance(stop, str) else stop) if text],
                plain=True,
            )
            for at, row in zip(order, done, strict=True):
                texts[at] = row[0].text
        return texts


def _sampling(options: Mapping[str, Any]) -> Sampling:
    """Reads the sampling of lm-eval's options: greedy unless they say do_sample or a temperature."""
    temperature = float(options.get("temperature", 1.0 if options.get("do_sample") else 0.0))
    if not options.get("do_sample", temperature > 0) or temperature == 0:
        return GREEDY
    return Sampling(
        temperature, int(options.get("top_k", 0)), float(options.get("top_p", 1)), float(options.get("min_p", 0))
    )


def find_harness_tasks(names: Sequence[str]) -> tuple[TaskManager, list[str]]:
    """lm-eval's tasks.

    Args:
        names: lm-eval's names of tasks, groups or tags, or files NAME.yaml that define the task NAME.

    Returns:
        The loader of the tasks, and their names.

    Raises:
        ValueError: There is no such file or task.
    """
    files = [Path(name) for name in names if name.endswith(".yaml")]
    if absent := [str(file) for file in files if not file.is_file()]:
        raise ValueError(f"there is no file {absent[0]}: give the file of a task, or the name of one of lm-eval's")
    manager = TaskManager(include_path=[*dict.fromkeys(str(file.parent) for file in files)])
    found = [Path(name).stem if name.endswith(".yaml") else name for name in names]
    if unknown := [name for name in found if not manager.match_tasks([name])]:
        raise ValueError(f"lm-eval has no task '{unknown[0]}': see `python -m lm_eval ls tasks`, or give NAME.yaml")
    return manager, found


def run_harness(
    loaded: LoadedModel, machine: Machine, manager: TaskManager, tasks: Sequence[str], limit: int | None = None
) -> list[Score]:
    """Asks the first `limit` questions of tasks from `find_harness_tasks`. A score for each task and metric."""
    results = lm_eval.simple_evaluate(
        LM(loaded, machine), tasks=list(tasks), limit=limit, task_manager=manager, log_samples=False
    )
    assert results is not None  # None only on other ranks
    scores = []
    for task, values in results["results"].items():
        count = int(results.get("n-samples", {}).get(task, {}).get("effective", 0))
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            limits = (0.0, 1.0) if metric in SHARES else (-math.inf, math.inf)
            ends = interval(value, error, *limits) if isinstance(error, float) else (None, None)
            if metric in SHARES and count and math.isclose(value * count, round(value * count)):
                ends = wilson(round(value * count), count)
            shots = int(results.get("n-shot", {}).get(task, 0))
            label = metric if kind == "none" else f"{metric} ({kind})"
            scores.append(Score(f"lm-eval/{task}", label, float(value), *ends, count, None, shots=shots))
    return scores
