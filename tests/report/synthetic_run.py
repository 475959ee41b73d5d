"""A run's folder as the stages would have written it: plausible records, no model. For the report's tests."""

import json
import math
from pathlib import Path
from typing import Any

from quern.eval.score import interval
from tests.support.rows import write_rows

RECIPE = {
    "schema": 1,
    "name": "gpt",
    "depth": 4,
    "data": "tinyworld",
    "seed": 7,
    "make_model": "quern.model.gpt:GPT",
    "text": {"vocab_size": 8192, "digits": 2, "tokenizer_megabytes": 16.0},
    "model": {"depth": 4, "width": 256, "head_dim": 64, "kv_heads": 4, "context": 512, "windows": "SSSL"},
    "train": {"steps": 1500, "batch_tokens": 8192, "warmdown_share": 0.65, "packing": "best-fit", "clip_norm": None},
    "sft": {"epochs": 2.0, "steps": 300, "batch_tokens": 8192, "lr_share": 0.3, "too_long": "crop"},
}

RUN = {
    "command": "quern run --data tinyworld --depth 4 --seed 7 --name first-light",
    "git": "3f9c2d1",
    "machine": {"processor": "Intel(R) Xeon(R) Processor @ 2.10GHz", "dtype": "bfloat16", "compiled": True},
    "versions": {"torch": "2.13.0", "numpy": "2.2.1", "quern": "0.1.0"},
    "model": {
        "parameters": {"total": 9437184, "transformer": 3145728, "embeddings": 6291456},
        "flops_per_token": 37748736,
        "kv_bytes_per_token": 4096,
    },
    "data": {"documents": 41233, "bytes": 24_000_118, "val": {"documents": 822, "bytes": 1_001_346}},
    "packing": {"method": "best-fit", "utilisation": 0.9991, "cropped_share": 0.0231},
    "tokenizer": {
        "vocabulary": 8192,
        "fingerprint": "a94a8fe5",
        "compression": [
            {"kind": "stories", "bytes": 120_433, "tokens": 26_018, "bytes_per_token": 4.6288},
            {"kind": "arithmetic", "bytes": 80_112, "tokens": 41_977, "bytes_per_token": 1.9085},
        ],
    },
}

SCORES = {
    # task: (chance, untrained, pretrain, sft)
    "tinyworld/facts": (0.08, 0.0, 0.21, 0.91),
    "tinyworld/sums": (0.0, 0.0, 0.03, 0.98),
    "tinyworld/word_problems": (0.0, 0.0, 0.01, 0.72),
    "tinyworld/spelling": (0.0, 0.0, 0.02, 0.64),
    "tinyworld/counting": (0.25, 0.19, 0.27, 0.55),
    "tinyworld/choice": (0.25, 0.26, 0.33, 0.83),
}

QUESTION = [
    {"role": "system", "content": "You are the miller's helper. Use the calculator for sums."},
    {"role": "user", "content": "Mira has 27 pears and picks 48 more. How many has she now?"},
]
ADDED = ("text", "Let me add them. "), ("tool", "27+48"), ("output", "75"), ("text", "Mira has 75 pears now.")
PARTS = [{"type": kind, "text": text} for kind, text in ADDED]
TALK = [
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "I am quern, a small model that grew up in a little world."},
    {"role": "user", "content": "And who is Odo?"},
    {"role": "assistant", "content": "Odo is a heron. He lives on the roof of the mill and likes frogs."},
]
STORY = (
    " lived in the mill by the river. Every morning she carried flour to the baker, who was a fox with a grey coat. "
    "“Good morning, Mira,” said the fox. “Is it windy on the hill?”\n\nShe nodded. The wheel had turned all night."
)
CONTINUED = (("Mira the otter", STORY), ("12 + 30 =", " 42\n7 + 15 = 22\n60 - 4 = 56"))
REASONS = {"skip": "the gradient is not finite", "stop": "SIGTERM"}


def write_run(folder: Path) -> Path:
    """Everything that pretraining and fine-tuning leave for the report."""
    _stage(folder / "pretrain", steps=1500, start=9.01, end=1.42, val=True)
    _stage(folder / "sft", steps=300, start=1.9, end=0.31, val=False)
    (folder / "run.json").write_text(json.dumps(RUN), encoding="utf-8")
    write_rows(folder / "evaluate.jsonl", _scores())
    talks = ([*QUESTION, {"role": "assistant", "content": PARTS}], TALK)
    told = ({"stage": "pretrain", "kind": "completion", "prompt": prompt, "text": text} for prompt, text in CONTINUED)
    chats = ({"stage": "sft", "kind": "chat", "messages": talk} for talk in talks)
    write_rows(folder / "samples.jsonl", [*told, *chats])
    return folder


def add_rl(folder: Path) -> None:
    """Reinforcement learning after the run of `write_run`: its records, and the scores of all stages on more tasks."""
    metrics: list[dict[str, Any]] = []
    for step in range(1, 61):
        share = step / 60
        reward = {"reward": 0.3 + 0.5 * share, "reward_std": 0.45 - 0.1 * share}
        lengths = {"reply_tokens": 40 + 20 * share, "truncated": 0.1 * (1 - share), "entropy": 0.9 - 0.5 * share}
        metrics.append({"step": step, "loss": -0.01, "dropped": 0.2 + 0.4 * share, "grad_norm": 0.3} | reward | lengths)
        if step % 10 == 0:
            passed = {"val_pass_1": 0.3 + 0.4 * share, "val_pass_4": 0.6 + 0.3 * share}
            metrics.append({"step": step, "val_kl": 0.02 * share, "val_pass_1/<b>sums": 0.4} | passed)
    write_rows(folder / "rl" / "metrics.jsonl", metrics)
    (folder / "rl" / "recipe.json").write_text(json.dumps(RECIPE), encoding="utf-8")
    found = _scores()
    for line in [line for line in found if line["stage"] == "sft" and line["metric"] == "accuracy"]:
        found.append(line | {"stage": "rl", "value": min(1.0, line["value"] + 0.06), "high": 1.0})
    for stage, core, text in (("pretrain", 0.05, 0.55), ("sft", 0.021, None), ("rl", -0.03, None)):
        mean = {"stage": stage, "metric": "centred accuracy", "count": 90_000, "chance": 0.0}
        found.append(mean | {"task": "CORE v2", "value": core, "low": core - 0.01, "high": core + 0.01})
        if stage != "pretrain":
            found.append(mean | {"task": "ChatCORE", "value": core + 0.1, "low": core + 0.08, "high": core + 0.12})
            code = {"task": "chat/humaneval", "metric": "pass@10", "value": 0.07, "low": None, "high": None}
            found.append(mean | code)
        for kind in ("train", "validation/stories", "validation/spelling") if text else ():
            found.append({"stage": stage, "task": kind, "metric": "bpb", "value": text, "count": 90_000, "chance": 3.3})
    write_rows(folder / "evaluate.jsonl", found)


def _stage(folder: Path, steps: int, start: float, end: float, val: bool) -> None:
    metrics: list[dict[str, Any]] = []
    for step in range(10, steps + 1, 10):
        share, tokens = step / steps, step * 8192
        loss, speed = start + share * (end - start), {"tokens_per_second": 16_000.0, "mfu": 0.63}
        counts = {"step": step, "tokens": tokens, "flops": tokens * 37_748_736, "seconds": tokens / 16_000}
        metrics.append(counts | speed | {"loss": loss, "lr_multiplier": 1 - share, "grad_norm": 1 - share})
        if val and step % 150 == 0:
            metrics.append(counts | {"val_loss": loss + 0.05, "val_bpb": (loss + 0.05) / 2.7})
    write_rows(folder / "metrics.jsonl", metrics)
    (folder / "recipe.json").write_text(json.dumps(RECIPE), encoding="utf-8")
    happened = [("start", 0), ("compile", 0), *(("save", 150 * number) for number in range(1, 5))]
    happened += [("skip", 655), ("stop", 730), ("resume", 730)] if val else []
    events = [
        {"kind": kind, "time": f"2026-03-01T10:{minute:02}:00Z", "step": step, "seconds": 0.4}
        | ({"reason": REASONS[kind]} if kind in REASONS else {})
        for minute, (kind, step) in enumerate([*happened, ("finish", steps)])
    ]
    write_rows(folder / "events.jsonl", events)


def _scores() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, (stage, bpb) in enumerate({"untrained": 3.324, "pretrain": 0.543, "sft": 0.611}.items()):
        text = {"task": "validation", "metric": "bpb", "value": bpb, "low": None, "high": None, "prompt_hash": None}
        found.append({"stage": stage, **text, "count": 1_001_346, "chance": 3.333, "bos": True, "shots": 0})
        for task, values in SCORES.items():
            value, count = values[1 + index], 200
            low, high = interval(value, math.sqrt(max(value * (1 - value), 0.004) / count))
            assert low is not None and high is not None
            score = {"task": task, "metric": "accuracy", "value": value, "low": max(0.0, low), "high": min(1.0, high)}
            how = {"prompt_hash": "9b74c9897bac770f", "bos": True, "shots": 0, "cropped": 0}
            found.append({"stage": stage, **score, "count": count, "chance": values[0], **how})
    return found
