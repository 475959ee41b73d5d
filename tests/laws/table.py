"""Writes docs/laws.md, and README.md's rows of it, from pytest's report on the tests of the laws.

    pytest --junitxml out/laws.xml tests/laws
    python tests/laws/table.py out/laws.xml README.md docs/laws.md

docs/laws.md is generated as a whole; in README.md, the rows of laws change. A law that was recorded several times
(shapes, dtypes, patterns) has one row, with its largest deviation. Only what tests of tests/laws recorded that passed
has rows. A deviation has the unit that its bar states.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

Law = Callable[..., None]
"""The fixture `law` of tests/conftest.py."""
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


def records(report: Path) -> list[dict[str, Any]]:
    """The entries that the `law` fixture recorded in tests that passed."""
    cases = ElementTree.parse(report).iter("testcase")
    passed = (case for case in cases if all(case.find(end) is None for end in ("failure", "error", "skipped")))
    found = (one for case in passed for one in case.iterfind("properties/property[@name='law']"))
    return [json.loads(one.attrib["value"]) for one in found]


def rows(records: Sequence[dict[str, Any]]) -> list[Row]:
    """One row for each law, by test file and then by law.

    Raises:
        ValueError: One law has different bars, or there are no records.
    """
    if not records:
        raise ValueError("no law was recorded: run pytest with --junitxml over tests/laws first")
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


def markdown(table: Sequence[Row], root: str) -> str:
    """The table; `root` is the path from its page to the root of the repository, such as "../" or ""."""
    lines = ["| law | bar | measured | test |", "|---|---|---|---|"]
    for law, bar, deviation, test in table:
        cells = [cell.replace("|", "\\|") for cell in (law, bar, deviation)]
        lines.append(f"| {' | '.join(cells)} | [{Path(test).name}]({root}{test}) |")
    return "\n".join(lines)


def updated(page: str, table: str) -> str:
    """The page with the table's row in place of each line whose first cell is the row's. Raises ValueError if the table
    has no row for a law of the page."""
    rows = {line.split(" | ")[0]: line for line in table.splitlines()}
    lines = page.split("\n")
    if gone := [line for line in lines if "](tests/laws/" in line and line.split(" | ")[0] not in rows]:
        raise ValueError(f"no test recorded the law of this row of the page: {gone[0]}")
    return "\n".join(rows.get(line.split(" | ")[0], line) for line in lines)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 3:
        print("usage: python tests/laws/table.py LAWS.xml README.md docs/laws.md", file=sys.stderr)
        return 2
    report, readme, laws = map(Path, arguments)
    table = rows(records(report))
    readme.write_text(updated(readme.read_text(encoding="utf-8"), markdown(table, "")), encoding="utf-8")
    laws.write_text(f"{HEAD}{markdown(table, '../')}\n", encoding="utf-8")
    print(f"{laws}: {len(table)} laws; {readme}: its rows of these")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
