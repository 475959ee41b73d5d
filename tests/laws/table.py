"""Writes docs/laws.md, and ten rows of it into README.md, from the deviations that the laws' tests recorded.

    pytest --laws-out out/laws.json tests/laws
    python tests/laws/table.py out/laws.json README.md docs/laws.md

docs/laws.md is generated as a whole; in README.md only the text between the two markers changes. A law that was
recorded several times (shapes, dtypes, patterns) has one row, with its largest deviation. Only tests that passed
record, and only those of tests/laws have rows. A deviation has the unit that its bar states.
"""

import json
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

Law = Callable[[str, float | int | str, str], None]
"""The fixture `law` of tests/conftest.py."""
BEGIN = "<!-- laws:begin -->"
END = "<!-- laws:end -->"
IN_README = (
    "token ids = tiktoken's for the same merges (texts that differ)",
    "an epoch holds every token once, however long the documents",
    "accumulation N = 1: every gradient",
    "flash attention = plain twin, y and gradients: lengths, windows, groups",
    "4 ranks = 1, uneven masks: ten updates",
    "tensor and sequence parallel = 1 rank, gpt: gradients",
    "resumed = uninterrupted: pretrain, fp32, killed at seeded points, some in a save",
    "cached = uncached, prompts of 7 lengths in one batch: logits, fp32; greedy tokens equal",
    "exported Llama = transformers' Llama: logits, fp32, odd sizes, grouped queries, in roundings",
    "JAX twin = PyTorch, loss curves over the first 80 of 300 steps",
)
"""The laws in README.md, in the order of the data flow."""
HEAD = """# The laws

A law says that two ways to the same result agree. Each row is a test, each test was shown able to fail, and
"measured" is the largest deviation in the last whole run. [numerics.md](numerics.md) explains the bars.
`make laws` generates this file.

"""

Row = tuple[str, str, str, str]
"""(law, bar, measured, test file)"""


def show(deviation: float | str) -> str:
    """Whole numbers without decimals, other numbers with two significant digits, words unchanged."""
    if isinstance(deviation, str):
        return deviation
    return f"{deviation:.0f}" if deviation == int(deviation) else f"{deviation:.1e}"


def rows(records: Sequence[dict[str, Any]]) -> list[Row]:
    """One row for each law, by test file and then by law.

    Raises:
        ValueError: One law has different bars, or there are no records.
    """
    if not records:
        raise ValueError("no law was recorded: run pytest with --laws-out over tests/laws first")
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in (one for one in records if one["test"].startswith("tests/laws/")):
        found.setdefault((record["test"], record["law"]), []).append(record)
    table = []
    for (test, law), same in sorted(found.items()):
        bars = {record["bar"] for record in same}
        if len(bars) > 1:
            raise ValueError(f"{test}: {law!r} is recorded with several bars, {sorted(bars)}; name it by its case")
        numbers = [record["deviation"] for record in same if not isinstance(record["deviation"], str)]
        words = sorted({record["deviation"] for record in same if isinstance(record["deviation"], str)})
        shown = ([show(max(numbers))] if numbers else []) + words
        table.append((law, bars.pop(), "; ".join(shown), test))
    return table


def chosen(table: Sequence[Row], laws: Collection[str]) -> list[Row]:
    """The rows of these laws, in this order. Raises ValueError for a law without a row."""
    by_law = {row[0]: row for row in table}
    if missing := [law for law in laws if law not in by_law]:
        raise ValueError(f"README.md shows laws that were not recorded: {missing}; correct IN_README in this file")
    return [by_law[law] for law in laws]


def markdown(table: Sequence[Row], root: str) -> str:
    """The table; `root` is the path from its page to the root of the repository, such as "../" or ""."""
    lines = ["| law | bar | measured | test |", "|---|---|---|---|"]
    for law, bar, deviation, test in table:
        cells = [cell.replace("|", "\\|") for cell in (law, bar, deviation)]
        lines.append(f"| {' | '.join(cells)} | [{Path(test).name}]({root}{test}) |")
    return "\n".join(lines)


def insert(page: str, table: str) -> str:
    """The page with `table` between the markers. Raises ValueError unless the page has each marker once."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must have {BEGIN} and {END} once each, on lines of their own")
    return f"{page.split(BEGIN)[0]}{BEGIN}\n{table}\n{END}{page.split(END)[1]}"


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 3:
        print("usage: python tests/laws/table.py LAWS.json README.md docs/laws.md", file=sys.stderr)
        return 2
    records, readme, laws = map(Path, arguments)
    table = rows(json.loads(records.read_text(encoding="utf-8")))
    page = insert(readme.read_text(encoding="utf-8"), markdown(chosen(table, IN_README), ""))
    readme.write_text(page, encoding="utf-8")
    laws.write_text(f"{HEAD}{markdown(table, '../')}\n", encoding="utf-8")
    print(f"{laws}: {len(table)} laws; {readme}: {len(IN_README)} of them")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
