"""The writer of the README's table: what it prints, what it refuses, and that it touches nothing else.

And a check on the page itself: every test file that records a law stands in the table, and no other.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_table():
    spec = importlib.util.spec_from_file_location("law_table", ROOT / "tests/laws/table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


table = load_table()


def record(law: str, deviation: float | str, bar: str = "≤ 1e-5", test: str = "tests/laws/test_a.py") -> dict:
    return {"law": law, "deviation": deviation, "bar": bar, "test": test}


def test_the_largest_deviation_of_a_law_stands_in_its_one_row() -> None:
    records = [
        record("a = b", 0.0),
        record("a = b", 3.26e-7),
        record("a = b", 1e-9),
        record("c | d", "equal", "bits"),
    ]
    assert table.markdown(records).splitlines() == [
        "| law | bar | measured | test |",
        "|---|---|---|---|",
        "| a = b | ≤ 1e-5 | 3.3e-07 | [test_a.py](tests/laws/test_a.py) |",
        "| c \\| d | bits | equal | [test_a.py](tests/laws/test_a.py) |",
    ]


def test_zero_and_counts_are_shown_as_whole_numbers() -> None:
    assert [table.show(value) for value in (0.0, 2000.0, 0.25, "equal")] == ["0", "2000", "2.5e-01", "equal"]


def test_two_bars_for_one_law_and_an_empty_record_are_refused() -> None:
    with pytest.raises(ValueError, match="several bars"):
        table.markdown([record("a", 1.0), record("a", 1.0, bar="≤ 1")])
    with pytest.raises(ValueError, match="no law was recorded"):
        table.markdown([])


def test_only_what_stands_between_the_markers_changes(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before \\1\n{table.BEGIN}\nold\n{table.END}\nafter\n", encoding="utf-8")
    laws = tmp_path / "laws.json"
    laws.write_text(json.dumps([record("a = b", 0.0)]), encoding="utf-8")
    for _ in range(2):  # writing twice changes nothing more
        assert table.main([str(laws), str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before \\1\n{table.BEGIN}\n| law |")
    assert text.endswith(f"| [test_a.py](tests/laws/test_a.py) |\n{table.END}\nafter\n")
    assert "old" not in text


def test_a_page_without_its_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="once each"):
        table.insert("no markers", "| law |")


def test_the_readme_lists_every_law_file_and_no_other() -> None:
    """`make laws` has been run since the last law was added."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    between = page.split(table.BEGIN)[1].split(table.END)[0]
    listed = set(re.findall(r"\]\((tests/[^)]+)\)", between))
    recording = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "tests" / "laws").rglob("test_*.py")
        if re.search(r"\blaw\(", file.read_text(encoding="utf-8"))
    }
    assert listed == recording, "run `make laws`"
