"""Steps that remove documents, and `Cleaned`, which applies them in order and counts what each removed.

A step looks at one document at a time and may remember those before it, so nothing is read twice. The counts are in a
file beside the token shards of each split, from which the report has them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from quern.data.token_file import fingerprint
from quern.records import read_json
from quern.temporaries import write_whole
from quern.validate import extra

SHINGLE_WORDS = 5  # near duplicates share most of their runs of so many words
PERMUTATIONS = 128
"""More make the decision about near duplicates sharper and slower; a kept document takes about 4 kB of memory."""
SPLITS = ("train", "val")
STOP_WORDS = frozenset("the be to of and that have with".split())
WORDS = 13
"""A text contains a passage if any run of so many words of the passage is in it: the rule of GPT-3 (Brown et al., 2020,
https://arxiv.org/abs/2005.14165, appendix C). Of a passage with fewer words, all of them, in order, must be there."""
SHORTEST = 5  # passages of fewer words are in every large text by chance, and are never looked for


@dataclass(frozen=True)
class Step:
    name: str  # for the report
    keep: Callable[[str], bool]  # whether a document stays
    mark: str = ""  # a digest of data from outside the recipe's file: other data makes another text


class Cleaned(Iterator[str]):
    """The documents that every step keeps. A document that a step removes is not shown to those after it."""

    def __init__(self, texts: Iterator[str], steps: Iterable[Step]) -> None:
        self.texts, self.steps = texts, tuple(steps)
        self.documents = 0  # how many were read so far
        self.removed = {step.name: 0 for step in self.steps}  # how many each step has removed, by its name

    def __next__(self) -> str:
        for text in self.texts:
            self.documents += 1
            step = next((step for step in self.steps if not step.keep(text)), None)
            if step is None:
                return text
            self.removed[step.name] += 1
        raise StopIteration


def recorded(texts: Iterator[str], folder: Path, split: str) -> Iterator[str]:
    """The documents; of `Cleaned`, the counts are written when all of them were read."""
    yield from texts
    if isinstance(texts, Cleaned):
        steps = [{"step": name, "removed": count} for name, count in texts.removed.items()]
        write_whole(_path(folder, split), json.dumps({"documents": texts.documents, "steps": steps}, indent=1))


class _Counts(TypedDict):
    documents: int
    steps: list[dict[str, Any]]


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The documents that each step removed from each split, and those that the split had before its first step."""
    rows = []
    for split in SPLITS:
        if _path(folder, split).exists():
            found = read_json(_path(folder, split), _Counts, "prepare the data again")
            rows += [{"split": split, "documents": found["documents"], **step} for step in found["steps"]]
    return rows


def _path(folder: Path, split: str) -> Path:
    return folder / f"cleaning-{split}.json"


def length(least: int, most: int | None = None) -> Step:
    """Removes documents of fewer than `least` or more than `most` characters."""
    return Step("length", lambda text: least <= len(text) and (most is None or len(text) <= most))


def exact_duplicates() -> Step:
    """Removes documents that equal an earlier one, apart from white space at both ends.

    It remembers 16 bytes of hash of each: that any two of 10⁹ documents are confused has a chance of 1 in 10²⁰.
    """
    seen: set[bytes] = set()

    def keep(text: str) -> bool:
        known = len(seen)
        seen.add(hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=16).digest())
        return len(seen) > known

    return Step("exact duplicates", keep)


def near_duplicates(threshold: float = 0.8) -> Step:
    """Removes documents that nearly equal an earlier one: MinHash (Broder, 1997) with locality-sensitive hashing.

    Args:
        threshold: The Jaccard similarity of the sets of runs of 5 words from which two documents count as the same;
            around it, the decision is a matter of chance, which is the same in every run.

    Raises:
        ImportError: datasketch is not installed.
    """
    with extra("data", "near duplicates need an extra package"):
        from datasketch import MinHash, MinHashLSH
    index, numbers = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS), itertools.count()

    def keep(text: str) -> bool:
        words = split_words(text)
        sketch = MinHash(num_perm=PERMUTATIONS, seed=1)
        sketch.update_batch([run.encode("utf-8") for run in runs(words, min(SHINGLE_WORDS, max(1, len(words))))])
        if index.query(sketch):
            return False
        index.insert(str(next(numbers)), sketch)
        return True

    return Step("near duplicates", keep)


def quality(least_words: int = 50) -> Step:
    """Removes what does not look like English prose, by rules of Gopher: too few words, words too short, too long or
    without letters, many symbols, bullets and ellipses, and fewer than two frequent words.

    Source: Rae et al., 2021, https://arxiv.org/abs/2112.11446, appendix A. Ours leave out the rules about repetitions
    and the largest number of words.
    """

    def keep(text: str) -> bool:
        words, lines = text.split(), [line for line in text.splitlines() if line.strip()]
        count = len(words)
        return (
            count >= least_words
            and 3 * count <= sum(map(len, words)) <= 10 * count
            and sum(any(map(str.isalpha, word)) for word in words) >= 0.8 * count
            and text.count("#") + text.count("…") + text.count("...") <= 0.1 * count
            and sum(line.lstrip().startswith(("•", "-", "*")) for line in lines) <= 0.9 * len(lines)
            and sum(line.rstrip().endswith(("…", "...")) for line in lines) <= 0.3 * len(lines)
            and len(STOP_WORDS.intersection(word.strip(",.;:!?").lower() for word in words)) >= 2
        )

    return Step("quality", keep)


def benchmark_questions(passages: Iterable[str]) -> Step:
    """Removes documents that share a run of words with a passage, such as a benchmark's question with its answer.

    `quern evaluate --contamination` counts by the same rule (`Passages`), so that it then counts none.
    """
    passages = tuple(passages)
    known = Passages(passages)
    return Step("benchmark questions", lambda text: next(known.found_in(text), None) is None, fingerprint(*passages))


def split_words(text: str) -> list[str]:
    """The words of a text, in lower case without punctuation."""
    return re.findall(r"\w+", text.lower())


def runs(words: Sequence[str], size: int) -> Iterator[str]:
    """All runs of `size` words."""
    return (" ".join(words[first : first + size]) for first in range(len(words) - size + 1))


def _digest(run: str) -> bytes:
    return hashlib.blake2b(run.encode("utf-8"), digest_size=8).digest()


class Passages:
    """Passages to find in texts. Each has a number, its place in the order in which they were given."""

    def __init__(self, passages: Iterable[str]) -> None:
        self._runs: dict[int, dict[bytes, list[int]]] = {}  # words of a run → its digest → the passages
        for number, passage in enumerate(passages):
            split = split_words(passage)
            size = min(WORDS, len(split))
            for run in runs(split, size) if size >= SHORTEST else ():
                self._runs.setdefault(size, {}).setdefault(_digest(run), []).append(number)

    def found_in(self, text: str) -> Iterator[int]:
        """The passages that share a run of words with a text; some of them several times."""
        split = split_words(text)
        for size, known in self._runs.items():
            for run in runs(split, size):
                yield from known.get(_digest(run), ())
