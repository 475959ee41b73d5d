"""`quern run`: the whole way from text to a chat, each stage going on where an earlier try stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quern.machine import Machine
from quern.recipe import Recipe
from quern.stages import evaluate, pretrain, report, sft
from quern.stages.places import STAGES, Places
from quern.stages.printable import printable
from quern.stages.report_records import read_run
from quern.train import checkpoint
from quern.train.guard import EXIT_DONE


def run(
    recipe: Recipe,
    machine: Machine,
    places: Places,
    *,
    questions: int,
    source: str | None,
    command: str,
    say: Callable[[str], None],
) -> int:
    """Prepares, pretrains, fine-tunes, evaluates and reports; returns an exit code."""
    common: dict[str, Any] = {"source": source, "say": say}
    steps: list[Callable[[bool], int]] = [
        lambda resume: pretrain.run(recipe, machine, places, resume=resume, command=command, **common),
        lambda resume: sft.run(recipe, machine, places, resume=resume, **common),
    ]
    for name, step in zip(STAGES, steps, strict=True):
        code = step(bool(checkpoint.steps(places.checkpoints(name))))
        if code != EXIT_DONE:
            return code
    callables = recipe.callables() if source else None
    evaluate.run(places, machine, questions=questions, say=say, callables=callables)
    for path in report.build(places.folder):
        say(f"report: {path}")
    say("")
    for line in sample_chat(places):
        say(line)
    return EXIT_DONE


def sample_chat(places: Places) -> list[str]:
    """The chats of the last evaluation, as lines for the terminal."""
    lines = []
    for sample in read_run(places.folder).samples[-evaluate.SHOWN_CHATS :]:
        for message in sample.get("messages", []):
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            spoken = " ".join(p["text"] if p["type"] == "text" else f"[{p['type']}: {p['text']}]" for p in parts)
            lines.append(f"{'you  ' if message['role'] == 'user' else 'quern'} │ {printable(spoken)}")
        lines.append("")
    return lines
