"""The table of laws: what its writer prints, refuses and leaves unchanged; and that both pages are up to date."""

import json
import re
from pathlib import Path

import pytest

from tests.laws import table

ROOT = Path(__file__).resolve().parent.parent


def record(law: str, deviation: float | str, bar: str = "≤ 1e-5", test: str = "tests/laws/test_a.py") -> dict:
    return {"law": law, "deviation": deviation, "bar": bar, "test": test}


def test_a_law_has_one_row_with_its_largest_deviation() -> None:
    records = [
        record("a = b", 0.0),
        record("a = b", 3.26e-7),
        record("a = b", 1e-9),
        record("c | d", "equal", "bits"),
        record("e = f", 2000.0),
        record("g = h", 0.0, test="tests/parallel/test_faults.py"),  # a campaign of the whole suite records these too
    ]
    assert table.markdown(table.rows(records), "../").splitlines() == [
        "| law | bar | measured | test |",
        "|---|---|---|---|",
        "| a = b | ≤ 1e-5 | 3.3e-07 | [test_a.py](../tests/laws/test_a.py) |",
        "| c \\| d | bits | equal | [test_a.py](../tests/laws/test_a.py) |",
        "| e = f | ≤ 1e-5 | 2000 | [test_a.py](../tests/laws/test_a.py) |",
    ]


def test_two_bars_for_one_law_and_an_empty_record_are_refused() -> None:
    with pytest.raises(ValueError, match="several bars"):
        table.rows([record("a", 1.0), record("a", 1.0, bar="≤ 1")])
    with pytest.raises(ValueError, match="no law was recorded"):
        table.rows([])


def test_the_pages_are_written_and_the_rest_of_the_readme_stays(tmp_path: Path) -> None:
    paths = records, page, laws = [tmp_path / name for name in ("laws.json", "README.md", "laws.md")]
    page.write_text(f"before \\1\n{table.BEGIN}\nstale\n{table.END}\nafter\n", encoding="utf-8")
    laws.write_text("stale", encoding="utf-8")
    recorded = [record(law, 0.0) for law in ("another = law", *table.IN_README)]
    records.write_text(json.dumps(recorded), encoding="utf-8")
    for _ in range(2):  # writing twice changes nothing more
        assert table.main(list(map(str, paths))) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before \\1\n{table.BEGIN}\n| law |")
    assert text.endswith(f"| [test_a.py](tests/laws/test_a.py) |\n{table.END}\nafter\n")
    assert "stale" not in text and "another = law" not in text and text.count("test_a.py](") == len(table.IN_README)
    whole = laws.read_text(encoding="utf-8")
    assert whole.startswith("# The laws\n") and whole.count("](../tests/laws/test_a.py)") == len(table.IN_README) + 1


def test_a_page_without_its_markers_and_a_law_without_a_record_are_refused() -> None:
    with pytest.raises(ValueError, match="once each"):
        table.insert("no markers", "| law |")
    with pytest.raises(ValueError, match="not recorded.*'c = d'"):
        table.chosen(table.rows([record("a = b", 0.0)]), ["a = b", "c = d"])


def test_the_pages_list_every_law_file_and_no_other() -> None:
    """`make laws` has been run since the last law was added, and README.md has the same rows."""
    page = (ROOT / "docs" / "laws.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(\.\./(tests/[^)]+)\)", page))
    recording = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "tests" / "laws").rglob("test_*.py")
        if re.search(r"\blaw\(", file.read_text(encoding="utf-8"))
    }
    assert listed == recording, "run `make laws`"
    readme = (ROOT / "README.md").read_text(encoding="utf-8").split(table.BEGIN)[1].split(table.END)[0]
    shown = [line for line in readme.splitlines() if "](tests/laws/" in line]
    assert [line.split(" | ")[0].removeprefix("| ") for line in shown] == list(table.IN_README), "run `make laws`"
    assert all(line.replace("](tests/", "](../tests/") in page.splitlines() for line in shown), "run `make laws`"
