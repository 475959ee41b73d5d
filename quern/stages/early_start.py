"""Early start: training begins when the first group of documents is prepared, and a child process prepares the rest.

The order of the documents is fixed by groups (data/batch.py), so batches do not depend on how much is prepared. Rank 0
has the child, which continues the preparation as `quern prepare` would after a stop. A text of one group is whole
before training begins, and has no child.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path

from quern.child import Child, end_with_parent, orders, replying, start
from quern.data.batch import DOCUMENT_SIZE
from quern.data.shards import Corpus, GrowingCorpus, prepared_in_part
from quern.flags.recipe_file import read_recipe_file
from quern.recipe import Recipe
from quern.stages.prepare import Division, open_source, write_splits
from quern.temporaries import scratch_folder
from quern.text.tokenizer import Tokenizer

POLL_SECONDS = 0.5
REPORT_SECONDS = 60.0
"""Between two lines on the child's progress."""
END_SECONDS = 2.0
"""Seconds in which the child may end; then it is killed."""
NICE = 10
"""The child yields the processor to training."""


class EarlyStart:
    """Opens a text whose first group is prepared. Use it in a `with` block that lasts as long as training.

    Args:
        main: Whether this rank prepares the text; the others read what rank 0 writes.
        source: The recipe's own Python file, as text.
        workers: Processes that encode text.
        division: Of the text.
        go_on: The command that continues after a stop, for messages.
        log: Takes lines for the user.
    """

    def __init__(
        self,
        main: bool,
        source: str | None,
        workers: int,
        division: Division,
        go_on: str,
        log: Callable[[str], None],
    ) -> None:
        self.main, self.division, self._source, self._workers = main, division, source, workers
        self._go_on, self._log = go_on, log
        self._stack, self._ended, self._reported = ExitStack(), threading.Event(), time.monotonic()
        self._child: Child | None = None
        self._failure, self._whole, self._closing = "", False, False

    def __enter__(self) -> EarlyStart:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing = True
        with self._stack:
            if self._child is not None:
                self._child.close()
                if not self._ended.wait(END_SECONDS):
                    self._child.process.kill()
                self._ended.wait()
                if not self._whole and not self._failure:
                    self._log("tokens: the rest of the text is not prepared; a longer run or `quern prepare` continues")

    def enough(self, documents: int, tokens: int) -> bool:
        """Whether so much of the text is more than the first group."""
        return tokens + DOCUMENT_SIZE * documents > self.division.group_size

    def open(self, recipe: Recipe, out: Path, folder: Path, mark: str, tokenizer: Tokenizer) -> Corpus:
        """Opens the training split of a folder whose first group is prepared, and starts the child on rank 0.

        Args:
            recipe: Resolved.
            out: The output folder.
            folder, mark: Of the shards, as for `ShardWriter`.
            tokenizer: Of the shards.
        """
        if self.main:
            _, tokens = prepared_in_part(folder, mark, "train")
            self._log(f"tokens: {tokens:,} are enough to begin; another process prepares the rest during training")
            self._start(recipe, out, folder, mark, tokenizer)
        return GrowingCorpus(folder, "train", mark, self._missing)

    def _start(self, recipe: Recipe, out: Path, folder: Path, mark: str, tokenizer: Tokenizer) -> None:
        own = self._stack.enter_context(scratch_folder())
        path = None if self._source is None else own / "own_recipe.py"
        if path is not None and self._source is not None:
            path.write_text(self._source, encoding="utf-8")
        order = {
            "recipe": recipe.to_json(),
            "source": path and str(path),
            "out": str(out),
            "folder": str(folder),
            "mark": mark,
            "tokenizer": str(tokenizer.save(own / "tokenizer.json")),
            "workers": self._workers,
            "division": asdict(self.division),
        }
        self._child = self._stack.enter_context(start("quern.stages.early_start", "preparation", order))
        threading.Thread(target=self._watch, args=(self._child,), name="preparation", daemon=True).start()

    def _watch(self, child: Child) -> None:
        """Shows what the child says, to its end."""
        try:
            while "whole" not in (answer := child.answer()):
                if "line" in answer or time.monotonic() - self._reported >= REPORT_SECONDS:
                    self._reported = time.monotonic()
                    with suppress(OSError):  # the reader of the lines is gone
                        self._log(answer.get("line") or answer["progress"])
            self._whole = True
        except RuntimeError as error:
            if not self._closing:
                self._failure = str(error)
                self._log(f"warning: {error}. Training ends when it needs text that is not prepared")
        finally:
            self._ended.set()

    def _missing(self, known: int) -> None:
        """Waits for the next shard, as `GrowingCorpus` asks."""
        if self._failure:
            raise RuntimeError(
                f"the text is prepared in part only, since {self._failure}. What is prepared is kept: correct the "
                f"cause, and continue with `{self._go_on}`"
            )
        if self._closing:
            raise RuntimeError("training has ended")
        self._ended.wait(POLL_SECONDS)  # after its end, the last shard is listed, or the failure is known


class _Lines(io.TextIOBase):
    """A text stream that hands over whole lines."""

    def __init__(self, put: Callable[[str], None]) -> None:
        self._put, self._rest = put, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._put(line)
        return len(text)


def main() -> None:
    """The child: continues the preparation that its order names, until its parent closes its standard input."""
    os.setsid()  # what stops the terminal's processes reaches the parent, which ends this one
    os.nice(NICE)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    with replying() as reply, redirect_stdout(_Lines(lambda line: reply({"progress": line}))):
        order, requests = orders()
        threading.Thread(target=end_with_parent, args=(requests,), daemon=True).start()
        callables = {} if order["source"] is None else read_recipe_file(Path(order["source"]))[0].callables()
        recipe = Recipe.from_json(order["recipe"], **callables)
        source, tokenizer = open_source(recipe, Path(order["out"])), Tokenizer.load(order["tokenizer"])
        if source.mark(tokenizer) != order["mark"]:
            raise ValueError(f"the text at {recipe.data} has changed since the run began: put it back as it was")
        division, say = Division(**order["division"]), lambda line: reply({"line": line})
        write_splits(source, tokenizer, Path(order["folder"]), say, division, order["workers"])
        reply({"whole": True})


if __name__ == "__main__":
    main()
