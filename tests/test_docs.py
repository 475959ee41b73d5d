"""The documents name only files, classes and pages that exist, and the map has the layers of the table."""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from quern.cli import options
from quern.flags.check_flags import check, flags_of
from tests.test_layers import LAYER, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted(path for room in ("quern", "tests", "experiments") for path in (ROOT / room).rglob("*.py"))
FILES = {"/" + path.relative_to(ROOT).as_posix() for path in SOURCES}
OF_THE_READER = "my_idea.py"
"""A file that a page tells its reader to write."""
OF_OTHERS = {"LlamaForCausalLM"}
"""Classes of other packages that the documents name."""


@cache
def classes() -> set[str]:
    return {
        node.name
        for path in SOURCES
        if path.is_relative_to(ROOT / "quern")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def faults(page: str, folder: Path) -> Iterator[str]:
    """Yields the names on a page in this folder of things that do not exist."""
    for path in re.findall(r"(?<![\w/.>…])((?:[\w.-]+/)*[\w-]+\.py)\b", page):
        if (
            not path.startswith("path/to/")
            and not path.endswith(OF_THE_READER)
            and not any(file.endswith(f"/{path.lstrip('./')}") for file in FILES)
        ):
            yield f"no file {path}"
    for name in re.findall(r"`((?=\w*[a-z])[A-Z]\w*[A-Z]\w*)[^`\n]*`", page):
        if name not in classes() | OF_OTHERS:
            yield f"no class {name}"
    for link in re.findall(r"\]\(([^)\s]+)\)", page):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = folder / path if path else None
        if target is not None and not target.exists():
            yield f"no page {link}"
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8") if target else page):
            yield f"no heading {link}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_names_what_exists(path: Path) -> None:
    assert list(faults(path.read_text(encoding="utf-8"), path.parent)) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("see `quern/model/gtp.py`", "no file quern/model/gtp.py"),
        ("`CachedContext` attends", "no class CachedContext"),
        ("[here](docs/nothing.md)", "no page docs/nothing.md"),
        ("[here](README.md#no-such-part)", "no heading README.md#no-such-part"),
        ("## A part\n[here](#another-part)", "no heading #another-part"),
    ],
)
def test_a_wrong_name_is_found(text: str, fault: str) -> None:
    assert list(faults(text, ROOT)) == [fault]


def test_right_names_are_no_faults() -> None:
    text = "`quern/model/gpt.py`, `gpt.py`, `RunDir.stage(name)`, `MEET`, [b](README.md#the-laws), [c](#a-part)"
    assert list(faults(f"## A part\n{text}", ROOT)) == []


def test_the_map_has_the_enforced_layers() -> None:
    number, mapped = 0, dict[str, int]()
    page = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    for line in page.partition("## Map")[2].partition("experiments/")[0].splitlines():
        number = int(line[:2]) if line[:2].strip().isdecimal() else number
        mapped |= {room.replace("/", "."): number for room in re.findall(r"([a-z/]+)/ ", line) if room != "quern"}
    assert mapped.items() <= LAYER.items()
    assert {room for room in LAYER if (ROOT / "quern" / room).is_dir()} <= mapped.keys()


def test_the_flags_beside_those_of_other_trainers_exist() -> None:
    """Each fragment of the second column is read by its verb, with its values."""
    kinds = {
        "pretrain": options.PretrainOptions,
        "prepare": options.PrepareOptions,
        "tokenizer": options.TokenizerOptions,
        "evaluate": options.EvaluateOptions,
        "complete": options.CompleteOptions,
        "chat": options.ChatOptions,
        "serve": options.ServeOptions,
    }
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    cells = [row.split(" | ")[1:] for row in page.splitlines() if row.startswith("| ")]
    fragments = [code for cell in cells for code in re.findall(r"`([^`]*--[^`]*)`", " ".join(cell))]
    assert len(fragments) > 60
    for fragment in fragments:
        words = shlex.split(fragment)
        verb, words = (words[1], words[2:]) if words[0] == "quern" else ("pretrain", words)
        assert check(flags_of(kinds[verb]), words, "quern")
    with pytest.raises(ValueError, match="--train.step"):
        check(flags_of(kinds["pretrain"]), ["--train.stepp", "3"], "quern")


def test_a_service_starts_no_script_of_a_copied_environment() -> None:
    """Such a script begins with the path of the environment for which it was made."""
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    starts = re.findall(r"^ExecStart=(?:\S*\.venv/bin/(\w+))?", pages, re.MULTILINE)
    assert set(starts) == {"python"}
