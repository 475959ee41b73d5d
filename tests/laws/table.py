"""Writes the README's table of laws from what their tests recorded.

    pytest --laws-out out/laws.json tests/laws
    python tests/laws/table.py out/laws.json README.md

It rewrites what stands between `<!-- laws:begin -->` and `<!-- laws:end -->` and nothing else. A law that was
recorded several times (shapes, dtypes, patterns) gets one row, with its largest deviation. It runs no test
and judges nothing: only tests that passed are recorded. Deviations are in the unit that the bar states.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN = "<!-- laws:begin -->"
END = "<!-- laws:end -->"


def show(deviation: float | str) -> str:
    """0 for none at all, whole numbers as they are, otherwise two significant digits."""
    if isinstance(deviation, str):
        return deviation
    return f"{deviation:.0f}" if deviation == int(deviation) else f"{deviation:.1e}"


def rows(records: Sequence[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """One (law, bar, deviation, test file) for each law, by test file and then by law.

    Raises ValueError when one law is stated with different bars, or when nothing was recorded.
    """
    if not records:
        raise ValueError("no law was recorded: run pytest with --laws-out over tests/laws first")
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
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


def markdown(records: Sequence[dict[str, Any]]) -> str:
    lines = ["| law | bar | measured | test |", "|---|---|---|---|"]
    for law, bar, deviation, test in rows(records):
        cells = [cell.replace("|", "\\|") for cell in (law, bar, deviation)]
        lines.append(f"| {' | '.join(cells)} | [{Path(test).name}]({test}) |")
    return "\n".join(lines)


def insert(page: str, table: str) -> str:
    """The page with `table` between the markers; raises ValueError unless each marker stands there once."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must hold {BEGIN} and {END} once each, on lines of their own")
    between = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    return between.sub(lambda _: f"{BEGIN}\n{table}\n{END}", page)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("usage: python tests/laws/table.py LAWS.json README.md", file=sys.stderr)
        return 2
    laws, readme = map(Path, arguments)
    records = json.loads(laws.read_text(encoding="utf-8"))
    page = readme.read_text(encoding="utf-8")
    readme.write_text(insert(page, markdown(records)), encoding="utf-8")
    print(f"{readme}: {len(rows(records))} laws")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
