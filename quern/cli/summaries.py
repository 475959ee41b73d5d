"""A summary and an example of each verb, the help that shows them, and what follows a verb."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quern.recipes import recipe_names
from quern.terminal import listed

if TYPE_CHECKING:
    from quern.flags.recipe_flags import Arguments

EXAMPLES = {
    "run": "quern run --depth 4 --run first",
    "prepare": "quern prepare --data texts/",
    "tokenizer": "quern tokenizer --data book.txt --text.vocab-size 4096",
    "pretrain": "quern pretrain gpt --depth 6 --data texts/ --run mine",
    "sft": "quern sft mine",
    "rl": "quern rl mine --rl.rewards counting spelling",
    "evaluate": "quern evaluate mine",
    "complete": 'quern complete mine -p "Once upon"',
    "chat": 'quern chat mine -p "Who are you?"',
    "serve": "quern serve mine --port 8000",
    "report": "quern report mine",
    "runs": "quern runs show mine",
    "bench": "quern bench train",
    "export": "quern export mine --to hf --dir mine-hf",
    "import": "quern import mine-hf --run copy",
    "grug": "quern grug train --data tinyworld --run twin",
    "completion": "quern completion bash > ~/.local/share/bash-completion/completions/quern",
    "lab": "quern lab compare experiments/baseline.py experiments/swiglu.py --depth 2 --train.steps 300",
}
OF_A_RUN = ("sft", "rl", "evaluate", "complete", "chat", "serve")
"""Verbs that take the recipe, and its Python file, from the run."""
NEXT = {
    "run": ("chat", "serve"),
    "pretrain": ("sft", "chat"),
    "sft": ("chat", "evaluate"),
    "rl": ("chat", "evaluate"),
    "evaluate": ("report", "chat"),
    "report": ("chat", "serve"),
    "import": ("chat", "evaluate"),
    "grug train": ("grug export",),
    "grug export": ("sft", "chat"),
}
"""The verbs that go on with the run where another one ends."""
SUMMARIES = {
    "run": "all stages: prepare, pretrain, fine-tune, evaluate, report; continues a run that was stopped",
    "prepare": "train the tokenizer and turn text into token shards",
    "tokenizer": "train a tokenizer and report how well it compresses",
    "pretrain": "train a base model",
    "sft": "fine-tune a run's base model on conversations",
    "rl": "let a run's chat model practise questions whose answers a program checks",
    "evaluate": "score a run's models on held-out text and questions",
    "complete": "continue a text with a run's base model",
    "chat": "talk to a run's model in the terminal",
    "serve": "serve a run's model: an OpenAI-compatible API and a chat page",
    "report": "write a run's report.md and report.html from its records",
    "runs": "list the runs; show, rename, remove or compare them",
    "bench": "measure this machine: data, training, generation",
    "export": "write a run's model for other programs: transformers (--to hf), llama.cpp and ollama (--to gguf)",
    "import": "make a run from a Llama in Hugging Face's format",
    "grug": "the JAX twin: train, eval, export, import, gauntlet",
    "completion": "print a script that completes verbs and flags with the Tab key, for bash, zsh or fish",
    "lab": "compare ideas over paired seeds; sweep; scaling; log; board; plan",
}


def usage() -> str:
    """The help of `quern`, within the width of the terminal."""
    more = {
        "recipes:": f"{', '.join(recipe_names())}, or the path of a Python file that ends in RECIPE = …",
        "flags:": "quern help VERB; all of them: quern VERB --help-all",
        "any verb:": "--trust-code runs the Python files that its runs keep, also if they come from elsewhere",
    }
    return "\n".join(
        [
            "quern grinds raw text into a language model you can talk to.\n",
            "usage: quern VERB [RECIPE|RUN] [FLAGS]\n",
            f"{listed(SUMMARIES)}\n",
            f"{listed(more)}\n",
            "examples:",
            *(f"  {example}" for example in EXAMPLES.values()),
        ]
    )


def described(verb: str) -> str:
    """The summary of a verb, its example, and what may follow it before the flags."""
    parts, takes = [SUMMARIES[verb], f"example: {EXAMPLES[verb]}"], []
    if verb in ("run", "prepare", "tokenizer", "pretrain"):
        parts.append(f"the defaults of another recipe, or of a file: quern {verb} llama --help")
        takes.append("RECIPE")
    if verb in (*OF_A_RUN, "run", "pretrain", "report", "export"):
        takes.append("RUN")
    if takes:
        parts.append(f"usage: quern {verb} [{'|'.join(takes)}] [FLAGS]")
    return "\n\n".join(parts)


def following(verb: str, words: Arguments) -> str:
    """The commands that go on where a verb has ended; empty if there are none."""
    verb = " ".join([verb, *words[:1]]) if verb == "grug" else verb
    if verb not in NEXT or "--check" in words or words.value("config"):  # a file may name another run
        return ""
    from quern.runs.run_dir import STAGES, RunDir

    found = RunDir(Path(words.value("out") or "out"), words.value("run") or "first")
    if verb == "report" and not any(map(found.has_trained, STAGES)):
        verb = "grug train"
    if verb == "grug train" and not found.exports:
        return ""
    by_flag = found.run in (*recipe_names(), "keys") or found.run.endswith(".py") or verb == "grug train"
    run = found.flags if by_flag else found.flags.removeprefix("--run ")
    return f"next: {', '.join(f'`quern {then} {run}`' for then in NEXT[verb])}"
