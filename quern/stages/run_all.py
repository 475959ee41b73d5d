"""`quern run`: the whole way from text to a chat, each stage going on where an earlier try stopped.

On several ranks every rank runs all of this. Rank 0 prepares texts and conversations while the others wait for it, the
ranks train and evaluate together, and rank 0 writes the report.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from quern.mixture.prepare import check_mixture
from quern.recipe import Recipe
from quern.records import read_lines
from quern.report.build import build
from quern.report.run_records import read_run
from quern.runs.origin import with_absolute_paths
from quern.runs.public_data import fetch_conversations
from quern.runs.run_dir import STAGES, RunDir, refuse_unwritable
from quern.runs.run_lock import run_lock
from quern.runs.saved import overlay, read_saved
from quern.stages import evaluate, pretrain, sft
from quern.stages.session import Session, main_first
from quern.text.printable import printable
from quern.text.tokenizer import Tokenizer
from quern.train import manifest
from quern.train.guard import EXIT_DONE


def run(recipe: Recipe, session: Session, *, questions: int, fine_tune: bool) -> int:
    """Prepares, pretrains, fine-tunes, evaluates and reports; each stage continues where it was stopped.

    On a mesh every rank calls this.

    Args:
        recipe: What to train; fields that are None follow from depth.
        session: Where, and how the command was given.
        questions: Held-out questions of each kind to evaluate with.
        fine_tune: Whether to fine-tune the base model on conversations.

    Returns:
        An exit code of `train.guard`.
    """
    refuse_unwritable(session.run_dir.out)
    with run_lock(session.run_dir, session.command, session.mesh):
        return _run(recipe, replace(session, locked=True), questions, fine_tune)


def _run(recipe: Recipe, session: Session, questions: int, fine_tune: bool) -> int:
    run_dir, source, log, mesh = session.run_dir, session.source, session.log, session.mesh
    # Whatever fine-tuning would refuse is refused before hours of pretraining, not after: at once what needs no
    # tokenizer, the rest when the text is prepared.
    chat_recipe = _for_fine_tuning(recipe, run_dir, session.named, source)

    def check(base: Recipe, tokenizer: Tokenizer) -> None:
        if fine_tune:
            sft.prepare_lessons(with_absolute_paths(chat_recipe), base, tokenizer, session)

    steps: dict[str, Callable[[bool], int]] = {
        "pretrain": lambda resume: pretrain.run(recipe, replace(session, stage="pretrain", resume=resume), check)
    }
    if fine_tune:
        with main_first(mesh):
            if mesh.main:
                refuse_conversations(chat_recipe, run_dir, log)
        steps["sft"] = lambda resume: sft.run(chat_recipe, replace(session, stage="sft", resume=resume))
    before = {name: max(manifest.steps(run_dir.checkpoints(name)), default=0) for name in steps}
    for name, step in steps.items():
        code = step(bool(manifest.steps(run_dir.checkpoints(name))))
        if code != EXIT_DONE:
            return code
    idle = before == {name: max(manifest.steps(run_dir.checkpoints(name))) for name in steps}
    if mesh.world.broadcast_object(idle and "questions" not in session.named and _is_evaluated(run_dir)):
        log(f"evaluated already: `quern evaluate {run_dir.flags}` evaluates it again")
    else:
        callables = recipe.callables() if source else None
        asked = evaluate.Questions(questions=questions)
        evaluate.run(run_dir, session.machine, asked, log, callables, mesh)
    if mesh.main:
        for path in build(run_dir.folder):
            log(f"report: {path}")
        log("")
        for line in sample_chat(run_dir):
            log(line)
    return EXIT_DONE


def _is_evaluated(run_dir: RunDir) -> bool:
    """Whether evaluate.jsonl has scores of the newest checkpoint of every stage."""
    scores = {(line["stage"], line["step"]) for line in read_lines(run_dir.folder / "evaluate.jsonl")}
    stages = [name for name in STAGES if run_dir.has_trained(name)]
    return all((name, max(manifest.steps(run_dir.checkpoints(name)))) in scores for name in stages)


def _for_fine_tuning(recipe: Recipe, run_dir: RunDir, named: Collection[str], source: str | None) -> Recipe:
    """What is asked of fine-tuning, where the recipe may be the one that pretraining saved."""
    if run_dir.has_trained("sft"):
        saved = read_saved(run_dir, "sft", recipe.callables() if source else None)
        return overlay(saved, recipe, named) if saved else recipe
    if not run_dir.has_trained("pretrain"):
        return recipe
    derived = {name: None for name in ("eval_every", "save_every") if f"train.{name}" not in named}
    return replace(recipe, train=replace(recipe.train, **derived))


def refuse_conversations(recipe: Recipe, run_dir: RunDir, log: Callable[[str], None]) -> None:
    """Reads the conversations that fine-tuning will need. Raises what reading them raises, and ValueError where they
    are others than those that fine-tuning began with."""
    if run_dir.has_trained("sft"):
        sft.require_same_conversations(recipe, run_dir)
        return
    check_mixture(recipe, run_dir.out, partial(fetch_conversations, out=run_dir.out))
    if recipe.conversations is None and recipe.data != "tinyworld":
        log(
            "no --conversations are named: after pretraining, the model is fine-tuned on those of the built-in world, "
            "to teach it to chat. --no-sft leaves it a base model"
        )


def sample_chat(run_dir: RunDir) -> list[str]:
    """The chats of the last evaluation, or the continuations of a base model, as lines for the terminal."""
    lines = []
    samples = read_run(run_dir.folder).samples
    for sample in [one for one in samples if one["stage"] == samples[-1]["stage"]][-evaluate.SHOWN_CHATS :]:
        if sample["kind"] == "completion":
            lines.append(f"quern │ {printable(sample['prompt'] + sample['text'])}")
        for message in sample.get("messages", []):
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            spoken = " ".join(p["text"] if p["type"] == "text" else f"[{p['type']}: {p['text']}]" for p in parts)
            lines.append(f"{'you  ' if message['role'] == 'user' else 'quern'} │ {printable(spoken)}")
        lines.append("")
    return lines
