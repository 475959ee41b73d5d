"""A summary and an example of each verb, and the help that shows them."""

from __future__ import annotations

from quern.recipes import recipe_names

EXAMPLES = {
    "run": "quern run --depth 4 --run first",
    "prepare": "quern prepare --data texts/",
    "tokenizer": "quern tokenizer --data book.txt --text.vocab-size 4096",
    "pretrain": "quern pretrain gpt --depth 6 --data texts/ --run mine",
    "sft": "quern sft --run mine",
    "rl": "quern rl --run mine --rl.rewards counting spelling",
    "evaluate": "quern evaluate --run mine",
    "complete": 'quern complete --run mine -p "Once upon"',
    "chat": 'quern chat --run mine -p "Who are you?"',
    "serve": "quern serve --run mine --port 8000",
    "report": "quern report --run mine",
    "runs": "quern runs show mine",
    "bench": "quern bench train",
    "export": "quern export --run mine --to hf --dir mine-hf",
    "import": "quern import mine-hf --run copy",
    "grug": "quern grug train --data tinyworld --run twin",
    "lab": "quern lab compare experiments/baseline.py experiments/swiglu.py --depth 2 --train.steps 300",
}
OF_A_RUN = ("sft", "rl", "evaluate", "complete", "chat", "serve")
"""Verbs that take the recipe, and its Python file, from the run."""
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
    "lab": "compare ideas over paired seeds; sweep; scaling; log; board; plan",
}


def usage() -> str:
    return "\n".join(
        [
            "quern grinds raw text into a language model you can talk to.\n",
            "usage: quern VERB [RECIPE] [FLAGS]\n",
            *(f"  {verb:10} {summary}" for verb, summary in SUMMARIES.items()),
            f"\nrecipes: {', '.join(recipe_names())}, or the path of a Python file that ends in RECIPE = …",
            "flags and their defaults: quern VERB --help",
            "--trust-code, with any verb: runs the Python files that its runs keep, also if they come from elsewhere\n",
            "examples:",
            *(f"  {example}" for example in EXAMPLES.values()),
        ]
    )


def described(verb: str) -> str:
    parts = [SUMMARIES[verb], f"example: {EXAMPLES[verb]}"]
    if verb == "run":
        parts.append("length: --train.steps for pretraining, --sft.steps or --sft.epochs for fine-tuning")
    if verb in ("run", "prepare", "tokenizer", "pretrain"):
        parts.append(f"the defaults of another recipe: quern {verb} {'|'.join(recipe_names())}|FILE.py --help")
    return "\n\n".join(parts)
