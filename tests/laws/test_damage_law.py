"""Law: a command that reads a damaged file works, or ends with one clear line, soon and in little memory.

Every kind of file is damaged (tests/support/damage.py): bits, lengths, values of other types and sizes at each place of
a JSON body, names that leave their folder, a pipe or a device in the place of a file.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.laws.table import Law
from tests.support.line_server import ENVIRONMENT, ROOT

FEW, MANY = 18, 2000


def failures(folder: Path, seed: int, trials: int) -> list[str]:
    """The trials that ended otherwise than with a result or one line."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/damage.py"), str(folder), str(seed), str(trials)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == trials, done.stderr[-3000:]
    refused = sum(row["outcome"] == "refused" for row in rows)
    assert refused > trials / 4, "too little of the damage is noticed"
    return [json.dumps(row, ensure_ascii=False) for row in rows if row["outcome"] not in ("read", "refused")]


def test_a_damaged_file_is_refused_in_a_line(law: Law, tmp_path: Path) -> None:
    found = failures(tmp_path, 0, FEW)
    law(f"a damaged file is read or refused in one line: {FEW} mutations, failures", len(found), "0")
    assert not found, "\n".join(found)


@pytest.mark.campaign
def test_many_damaged_files_are_refused_in_a_line(law: Law, tmp_path: Path) -> None:
    found = failures(tmp_path, 1, MANY)
    law(f"a damaged file is read or refused in one line: {MANY:,} mutations, failures", len(found), "0")
    assert not found, "\n".join(found)
