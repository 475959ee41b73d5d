"""The table of laws: what its writer prints, refuses and leaves unchanged; and that both pages are up to date."""

import json
import re
from pathlib import Path
from xml.sax.saxutils import quoteattr

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


def test_what_passed_is_written_and_the_rest_of_the_readme_stays(tmp_path: Path) -> None:
    report, page, laws = paths = [tmp_path / name for name in ("laws.xml", "README.md", "laws.md")]
    values = (quoteattr(json.dumps(record("a = b", deviation))) for deviation in (3.26e-7, 1.0, 2.0))
    case = "<testcase><properties><property name='law' value={}/></properties>{}</testcase>"
    cases = map(case.format, values, ("", "<failure/>", "<skipped/>"))
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>", encoding="utf-8")
    page.write_text("before\n| a = b | stale |\n| a = c | kept |\n\nafter", encoding="utf-8")
    for _ in range(2):  # writing twice changes nothing more
        assert table.main(list(map(str, paths))) == 0
    row = "| a = b | ≤ 1e-5 | 3.3e-07 | [test_a.py](tests/laws/test_a.py) |"
    assert page.read_text(encoding="utf-8") == f"before\n{row}\n| a = c | kept |\n\nafter"
    assert laws.read_text(encoding="utf-8").endswith(f"|---|\n{row.replace('(tests', '(../tests')}\n")
    page.write_text(row.replace("a = b", "a = c"), encoding="utf-8")
    with pytest.raises(ValueError, match="no test recorded the law of this row of the page: . a = c"):
        table.main(list(map(str, paths)))


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
    shown = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if "](tests/laws/" in line]
    assert len(shown) == 10, "README.md says that they are ten"
    assert all(line.replace("](tests/", "](../tests/") in page.splitlines() for line in shown), "run `make laws`"
