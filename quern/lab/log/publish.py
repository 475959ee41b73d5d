"""`quern lab log`: the experiment log, one page per study and the ideas' verdicts, all from records.

The records of a study are copied to `experiments/records/STUDY/`. `docs/experiments/STUDY.md` with its figures,
`experiments/LOG.md` and the `Verdict:` in the docstring of each idea's file are generated from them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from quern.lab.arms import read_idea, with_verdict
from quern.lab.ladder.study import ARMS, FILES, Comparison
from quern.lab.log import pages
from quern.lab.log.comparison import ComparisonPage
from quern.lab.log.pages import HEADER, Page, Verdict
from quern.lab.options import LogOptions
from quern.temporaries import write_whole
from quern.terminal import counted

OLD = "old baseline: "
FOLDERS = re.compile(  # of absolute paths in messages; with spaces, those in quotes and those of `process.own_place`
    r"""(?<=')/[^'"\\]*/|(?:(?<=failed: )|(?<=": "))/[^:'"\\]*/(?=[^/:'"\\]+\.py, line \d)"""
    r"""|(?:(?<![\w/:.])|(?<=\\n))/(?:[^\s/"'\\]+/)+"""
)
KINDS: tuple[tuple[Sequence[str], Callable[[Path], Page]], ...] = (
    (FILES, lambda folder: ComparisonPage(Comparison(folder)).page()),
    (pages.SWEEP_FILES, pages.read_sweep),
    (pages.SCALING_FILES, pages.read_scaling),
)
"""For each kind of study: the files of its records, and the function that makes its page from a folder of them."""
INTRODUCTION = (
    "# The experiment log\n",
    "In a comparison, each row is an idea against the baseline of its study, over paired seeds. Differences are in "
    "bits per byte of held-out text: below 0 the idea is better. A multiplier of 1.08 says that the baseline needs 8 % "
    "more compute; its interval is a plain one of 95 %, for one idea and one look, so it may exclude 1 where the "
    "verdict is still undecided. docs/statistics.md and docs/ladder.md of quern explain both.\n",
)


def run(options: LogOptions, log: Callable[[str], None]) -> int:
    """Publishes studies and renews every page. Returns the exit code."""
    records = options.folder / "experiments" / "records"
    if not records.parent.is_dir():
        raise FileNotFoundError(f"{records.parent} is no folder: name a project's folder with --folder, or make it")
    if not options.study and not records.is_dir():
        raise FileNotFoundError(f"{records} has no published study: name one of {options.out / 'lab'} with --study")
    for name in options.study:
        source = options.out / "lab" / name
        _page(source)  # a damaged study leaves what was published as it is
        texts = _public(source, options.folder)
        _refuse_loss(records / name, texts)
        (records / name).mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            write_whole(records / name / file, text)
    studies = sorted(map(_page, filter(Path.is_dir, records.glob("*"))), key=lambda page: (page.registered, page.name))
    lines = [*INTRODUCTION]
    for study in studies:
        lines += [f"## [{study.name}](../docs/experiments/{study.name}.md)\n", *study.section, ""]
    written = {f"docs/experiments/{name}": text for study in studies for name, text in study.files.items()}
    ideas = idea_files(studies, options.folder / "experiments")  # refuses a damaged file before a page is written
    for path, text in {"experiments/LOG.md": HEADER + "\n".join(lines), **written}.items():
        (options.folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(options.folder / path, text)
        log(f"wrote {path}")
    for path, text in ideas.items():
        line_end = "\r\n" if b"\r\n" in path.read_bytes() else "\n"
        write_whole(path, text.replace("\n", line_end))
        log(f"wrote the verdicts in {path}")
    return 0


def _refuse_loss(published: Path, texts: dict[str, str]) -> None:
    """Raises ValueError if a published study has lines that the records which would replace it lack."""
    for file, text in texts.items():
        if file.endswith(".jsonl") and (published / file).is_file():
            before = (published / file).read_text(encoding="utf-8")
            if lost := {*(before if file == ARMS else FOLDERS.sub("", before)).splitlines()} - {*text.splitlines()}:
                raise ValueError(
                    f"{published / file} has {counted(len(lost), 'line')} that this study of the same name lacks: go "
                    "on from the published records, rename the study's folder, or remove the published one"
                )


def _kind(folder: Path) -> tuple[Sequence[str], Callable[[Path], Page]]:
    """The files of the study in a folder, and what reads them."""
    for files, read in KINDS:
        if all((folder / file).is_file() for file in files):
            return files, read
    verbs = "`quern lab compare`, `quern lab sweep` and `quern lab scaling`"
    raise FileNotFoundError(f"there is no finished study in {folder}: {verbs} make one")


def _page(folder: Path) -> Page:
    """The page of the study in a folder. Raises ValueError if its records are not whole."""
    try:
        return _kind(folder)[1](folder)
    except (LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{folder} is damaged ({error!r}): put back a copy of its files, or remove it") from error


def _public(source: Path, project: Path) -> dict[str, str]:
    """The records of a study by file, without the folders of the texts, of the recipe files and in messages: records
    are published, folders are private. The fingerprint identifies the text."""
    texts = {file: (source / file).read_text(encoding="utf-8") for file in _kind(source)[0]}
    for file, text in texts.items():
        if not file.endswith(".json"):
            texts[file] = text if file == ARMS else FOLDERS.sub("", text)  # arms hold the sources of ideas
            continue
        for name in sorted(set(_text_paths(json.loads(text))), key=len, reverse=True):  # one may begin another
            text = text.replace(json.dumps(name)[1:-1], json.dumps(Path(name).name)[1:-1])
        body = json.loads(text)
        if facts := body.get("facts"):
            facts["command"] = _public_command(facts["command"], project)
        texts[file] = json.dumps(body, indent=1) + "\n"
    return texts


def _text_paths(body: Any) -> Iterator[str]:
    """The paths of texts and tokenizers in every recipe in a record."""
    if isinstance(body, dict):
        if "data" in body and "val" in body:
            names = "\n".join(str(name) for name in (body["data"], body["val"], body["text"]["tokenizer"]))
            yield from (name for name in names.split("\n") if "/" in name)
        for value in body.values():
            yield from _text_paths(value)


def _public_command(command: str, project: Path) -> str:
    """A command whose absolute paths have become paths in experiments/, or names."""
    shown = []
    for word in shlex.split(command):
        flag, equals, value = word.rpartition("=")
        if value.startswith("/") or (value.endswith(".py") and not (project / value).is_file()):
            found = sorted((project / "experiments").rglob(Path(value).name))
            value = found[0].relative_to(project).as_posix() if found else Path(value).name
        shown.append(f"{flag}{equals}{value}")
    return shlex.join(shown)


def idea_files(studies: Sequence[Page], folder: Path) -> dict[Path, str]:
    """The files of ideas, and their index, whose verdicts change: path → new text. Verdicts on an idea that has changed
    since (`Idea.changed`) are told apart, and the index leaves them out."""
    index = folder / "README.md"
    texts = {index: index.read_text(encoding="utf-8")} if index.exists() else {}
    changed = dict(texts)
    for path in filter(Path.exists, folder.rglob("*.py")):  # an editor's lock is a link to nothing
        try:
            texts[path] = path.read_text(encoding="utf-8-sig")
            idea = read_idea(texts[path])
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{path} is no Python file ({error}): repair it, or move it out of {folder}") from error
        if not idea.verdict:
            continue
        told: dict[bool, list[Verdict]] = {True: [], False: []}
        for study in reversed(studies):
            told[study.registered >= idea.changed] += study.verdicts.get(path.stem, ())
        (now, short), (former, _) = _told(told[True]), _told(told[False])
        verdict = (now or "not yet measured.") + (former and f" Before the change: {former}")
        changed[path] = with_verdict(texts[path], verdict)
        row = re.compile(rf"^(\| \[{re.escape(path.stem)}\.py\].*\| )[^|]*( \|)$", re.MULTILINE)
        changed[index] = row.sub(lambda match, short=short: f"{match[1]}{short}{match[2]}", changed.get(index, ""))
    return {path: text for path, text in changed.items() if text != texts.get(path, "")}


def _told(found: Sequence[Verdict]) -> tuple[str, str]:
    """The verdicts that count, and the verdict in the index, on the highest rung of today's baseline. found: the newest
    study first. On one rung against one baseline, the verdict with the most runs counts: a study that was interrupted
    does not replace a whole one. Of equally many, a decided one counts before an undecided, then the newest."""
    most: dict[Any, Verdict] = {}
    for one in sorted(found, key=lambda one: (-one.runs, not one.decided)):
        most.setdefault((one.baseline, one.rung), one)
    kept = [one for one in found if one in most.values()]
    if not kept:
        return "", "not yet measured"
    texts = [
        f"{OLD if old else ''}{'; '.join(one.text for one in verdicts)}. Study {study}."
        for (study, old), verdicts in groupby(kept, key=lambda one: (one.study, one.old))
    ]
    top = max(kept, key=lambda one: (not one.old, one.rung))
    return " Before: ".join(texts), (OLD if top.old else "") + top.short
