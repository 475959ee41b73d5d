"""Pretrains a toy model on a text that is prepared while it trains: in this process, in one of its own, or on ranks.

    python tests/support/early_run.py FOLDER RUN [resume]        exits with the code of the stage, or 1 with its error

The folder has text.jsonl and tokenizer.json. The documents of the recipe wait at number `HELD` until the folder has a
file `go`, so that the test decides how much of the text is prepared when training begins. The text may also be the data
set that a file `data` of the folder names.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quern import compiler
from quern.flags.recipe_file import read_recipe_file
from quern.machine import Machine
from quern.mesh import Mesh, alone
from quern.recipe import Recipe
from quern.runs.run_dir import RunDir
from quern.stages import pretrain
from quern.stages.prepare import Division
from quern.stages.session import Session
from quern.temporaries import write_whole
from quern.text.tokenizer import Tokenizer

DOCUMENTS, HELD, STEPS = 600, 330, 80
"""The steps need all of the text, and begin a second epoch."""
DIVISION = Division(shard_tokens=2000, unit_characters=3000, group_size=100_000)
SOURCE = """
import time
from dataclasses import replace
from pathlib import Path
from quern.recipes.gpt import RECIPE as BASE

def documents(texts, split):
    for number, text in enumerate(texts):
        while split == "train" and number == {held} and not Path({go!r}).exists():
            time.sleep(0.02)
        if split == "train" and number == {held} and "broken" in Path({go!r}).read_text():
            raise ValueError("this text cannot be read")
        yield text

RECIPE = replace(BASE, make_documents=documents)
"""


def write_inputs(folder: Path) -> None:
    """Writes the text and its tokenizer."""
    rng, words = random.Random(2), "mill stone grain flour river baker 17 482 wheel one by the of".split()
    texts = [" ".join(rng.choices(words, k=rng.randrange(20, 90))) for _ in range(DOCUMENTS)]
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    Tokenizer.train(texts, 300).save(folder / "tokenizer.json")


def asked(folder: Path) -> tuple[Recipe, str]:
    """The recipe, and its source."""
    path = folder / "own.py"
    write_whole(path, SOURCE.format(held=HELD, go=str(folder / "go")))  # several ranks write it
    recipe, source = read_recipe_file(path)
    named = folder / "data"
    recipe = replace(
        recipe,
        depth=2,
        data=named.read_text(encoding="utf-8") if named.exists() else str(folder / "text.jsonl"),
        text=replace(recipe.text, tokenizer=str(folder / "tokenizer.json"), val_megabytes=0.005),
        model=replace(recipe.model, width=16, head_dim=16, context=64),
        train=replace(recipe.train, batch_tokens=512, steps=STEPS, save_every=7, log_every=1, eval_every=40),
    )
    return recipe, source


def session_of(folder: Path, run: str, resume: bool, mesh: Mesh, lines: list[str] | None = None) -> Session:
    return Session(
        stage="pretrain",
        machine=Machine(torch.device("cpu"), torch.float32, compile=False, threads=1),
        run_dir=RunDir(folder / "out", run),
        resume=resume,
        source=asked(folder)[1],
        log=print if lines is None else lines.append,
        mesh=mesh,
        workers=1,
        division=DIVISION,
    )


def train(folder: Path, run: str, *, resume: bool = False, lines: list[str] | None = None) -> int:
    """Trains in this process."""
    with compiler.eager():
        return pretrain.run(asked(folder)[0], session_of(folder, run, resume, alone(), lines))


def train_on_ranks(mesh: Mesh, folder: str, run: str) -> int:
    """Trains on the ranks of tests/support/ranks.py."""
    with compiler.eager():
        return pretrain.run(asked(Path(folder))[0], session_of(Path(folder), run, False, mesh))


def losses(folder: Path, run: str) -> list[dict[str, Any]]:
    """What was learned, line by line."""
    path = folder / "out" / "runs" / run / "pretrain" / "metrics.jsonl"
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ())
    return [{key: line[key] for key in ("step", "loss", "grad_norm", "val_bpb") if key in line} for line in lines]


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        sys.exit(train(Path(sys.argv[1]), sys.argv[2], resume="resume" in sys.argv[3:]))
    except RuntimeError as error:
        sys.exit(str(error))
