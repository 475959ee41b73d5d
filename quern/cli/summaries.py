"""One line and one example for each verb, and the help that is made from them."""

from __future__ import annotations

from quern.recipes import recipe_names

EXAMPLES = {
    "run": "quern run --depth 4 --run first",
    "prepare": "quern prepare --data texts/",
    "tokenizer": "quern tokenizer --data book.txt --text.vocab-size 4096",
    "pretrain": "quern pretrain gpt --depth 6 --data texts/ --run mine",
    "sft": "quern sft --run mine",
    "evaluate": "quern evaluate --run mine",
    "complete": 'quern complete --run mine -p "Once upon"',
    "chat": 'quern chat --run mine -p "Who are you?"',
    "serve": "quern serve --run mine --port 8000",
    "report": "quern report --run mine",
    "bench": "quern bench train",
    "export": "quern export --run mine --to hf --dir mine-hf",
    "import": "quern import mine-hf --run copy",
    "grug": "quern grug train --data tinyworld --run twin",
    "lab": "quern lab plan gpt --depth 20 --gpus 64 --gpu h100 --network ib-ndr",
}
OF_A_RUN = ("sft", "evaluate", "complete", "chat", "serve")
"""Verbs that follow a run's own recipe; they need its file where it has code of its own."""
SUMMARIES = {
    "run": "the whole way: prepare, pretrain, fine-tune, evaluate, report; goes on where it was stopped",
    "prepare": "train the tokenizer and turn text into token shards",
    "tokenizer": "train a tokenizer and report how well it compresses",
    "pretrain": "train a base model",
    "sft": "fine-tune a run's base model on conversations",
    "evaluate": "score a run's models on held-out text and questions",
    "complete": "continue a text with a run's base model",
    "chat": "talk to a run's model in the terminal",
    "serve": "serve a run's model: an OpenAI-compatible API and a page to chat on",
    "report": "write report.md and report.html of a run from its records",
    "bench": "measure this machine: data, training, generation",
    "export": "write a run's model in a format that other programs read",
    "import": "make a run of a Llama in Hugging Face's format",
    "grug": "the JAX twin: train, eval, export, import, gauntlet",
    "lab": "plan: what a run would take on some GPUs, before it starts",
}


def usage() -> str:
    lines = [
        "quern grinds raw text into a language model you can talk to.",
        "",
        "usage: quern VERB [RECIPE] [FLAGS]",
        "",
    ]
    lines += [f"  {verb:10} {SUMMARIES[verb]}" for verb in SUMMARIES]
    lines += [
        "",
        f"recipes: {', '.join(recipe_names())}, or the path of a Python file that ends in RECIPE = …",
    ]
    lines += ["flags and their defaults: quern VERB --help", "", "examples:"]
    lines += [f"  {example}" for example in EXAMPLES.values()]
    return "\n".join(lines)


def described(verb: str) -> str:
    parts = [SUMMARIES[verb], f"example: {EXAMPLES[verb]}"]
    if verb == "run":
        parts.append("--train.steps shortens pretraining alone; --sft.steps, or --sft.epochs, fine-tuning")
    if verb in ("run", "prepare", "tokenizer", "pretrain"):
        parts.append(f"a recipe's own defaults: quern {verb} {'|'.join(recipe_names())}|FILE.py --help")
    return "\n\n".join(parts)
