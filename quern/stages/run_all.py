"""`quern run`: the whole way from text to a chat, each stage going on where an earlier try stopped.

On several ranks every rank runs all of this. Rank 0 prepares texts and conversations while the others wait for it, the
ranks train and evaluate together, and rank 0 writes the report.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from quern.generate.tools import spoken
from quern.recipe import FOR_FINE_TUNING, ConversationSource, Recipe, Resolved
from quern.records import read_lines
from quern.report.build import build
from quern.report.records import read_run
from quern.runs.origin import overlay, read_origin, read_saved, require_same, with_absolute_paths
from quern.runs.run_dir import STAGES, RunDir
from quern.runs.run_lock import run_lock
from quern.stages import evaluate, pretrain, sft
from quern.stages.complete import GOES_ON, continued
from quern.stages.session import Session
from quern.terminal import printable
from quern.text.chat import parts
from quern.text.tokenizer import Tokenizer
from quern.train import manifest
from quern.train.guard import EXIT_DONE
from quern.validate import flag


def run(recipe: Recipe, session: Session, *, questions: int, chat: bool = False, sft: bool = True) -> int:
    """Prepares, pretrains, fine-tunes, evaluates and reports, and returns an exit code of `train.guard`.

    Each stage continues where it was stopped. On a mesh every rank calls this.

    Args:
        questions: Held-out questions of each kind to evaluate with.
        chat: Whether to fine-tune a model of another text than the built-in world for which no conversations are named.
        sft: Whether to fine-tune at all.
    """
    own = recipe.data != "tinyworld" and recipe.conversations is None
    if chat and own:
        recipe = replace(recipe, conversations=(ConversationSource("tinyworld"),))
    fine_tune = sft and (chat or not own or session.run_dir.has_trained("sft"))
    asked = [name for name in session.named if name != "sft" and name.startswith(FOR_FINE_TUNING)] + ["chat"] * chat
    if asked and not fine_tune:
        other = "a text of your own gets it with --chat or --conversations: give one of them, too"
        other = other if sft else "--no-sft for none: leave one of them out"
        raise ValueError(f"--{flag(min(asked))} asks for fine-tuning, and {other}")
    with run_lock(session.run_dir, session.command, session.mesh):
        return _run(recipe, replace(session, locked=True), questions, fine_tune)


def _run(recipe: Recipe, session: Session, questions: int, fine_tune: bool) -> int:
    run_dir, log, mesh = session.run_dir, session.log, session.mesh
    callables = recipe.callables() if session.source else None
    stages = ("pretrain", "sft") if fine_tune else ("pretrain",)
    chat_recipe = _for_fine_tuning(recipe, run_dir, session.named, callables)

    def check(base: Resolved, tokenizer: Tokenizer) -> None:
        """Whatever fine-tuning would refuse is refused before hours of pretraining, not after."""
        if fine_tune:
            began = read_origin(run_dir.stage("sft")) if run_dir.has_trained("sft") else None
            lessons = sft.prepare_lessons(with_absolute_paths(chat_recipe), base, tokenizer, session, began)
            if began is not None:
                require_same(began, replace(began, conversations=lessons.fingerprint), run_dir, "sft")

    before = [_newest(run_dir, name) for name in stages]
    for name in stages:
        own = replace(session, stage=name, resume=run_dir.has_trained(name))
        code = pretrain.run(recipe, own, check) if name == "pretrain" else sft.run(chat_recipe, own)
        if code != EXIT_DONE:
            return code
    idle = before == [_newest(run_dir, name) for name in stages]
    if mesh.world.broadcast_object(idle and "questions" not in session.named and _is_evaluated(run_dir)):
        log(f"evaluated already: `quern evaluate {run_dir.flags}` evaluates it again")
    else:
        evaluate.run(run_dir, session.machine, evaluate.Questions(questions=questions), log, callables, mesh)
    if mesh.main:
        for path in build(run_dir.folder):
            log(f"report: {path}")
        for line in ("", *sample_chat(run_dir)):
            log(line)
    return EXIT_DONE


def _newest(run_dir: RunDir, stage: str) -> int:
    """The step of a stage's newest checkpoint; 0 if there is none."""
    return max(manifest.steps(run_dir.checkpoints(stage)), default=0)


def _is_evaluated(run_dir: RunDir) -> bool:
    """Whether evaluate.jsonl has scores of the newest checkpoint of every stage."""
    scores = {(line["stage"], line["step"]) for line in read_lines(run_dir.folder / "evaluate.jsonl")}
    return all((name, _newest(run_dir, name)) in scores for name in STAGES if run_dir.has_trained(name))


def _for_fine_tuning(
    recipe: Recipe, run_dir: RunDir, named: Collection[str], callables: dict[str, Callable[..., Any]] | None
) -> Recipe:
    """Returns what the user asks of fine-tuning; the recipe may be the one that pretraining saved."""
    if run_dir.has_trained("sft") and (saved := read_saved(run_dir, "sft", callables)):
        return overlay(saved, recipe, named)
    if not run_dir.has_trained("pretrain"):
        return recipe
    derived = {name: None for name in ("eval_every", "save_every") if f"train.{name}" not in named}
    return replace(recipe, train=replace(recipe.train, **derived))


def sample_chat(run_dir: RunDir) -> list[str]:
    """The chats of the last evaluation, or the continuations of a base model, as lines for the terminal."""
    samples = read_run(run_dir.folder).samples
    last = [one for one in samples if one["stage"] == samples[-1]["stage"]][-len(evaluate.CHATS) :]
    lines = list[str]()
    if last and last[0]["kind"] == "completion":
        lines = [f"the base model continues texts that it has not read, from {GOES_ON} on:", ""]
    for sample in last:
        if sample["kind"] == "completion":
            lines += continued(sample["prompt"], sample["text"])
        for message in sample.get("messages", []):
            who = "you  " if message["role"] == "user" else "quern"
            lines.append(f"{who} │ {printable(spoken(parts(message)))}")
        lines.append("")
    return lines
