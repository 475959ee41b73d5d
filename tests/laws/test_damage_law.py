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


@pytest.mark.parametrize(("trials", "seed"), [(18, 0), pytest.param(2000, 1, marks=pytest.mark.campaign)])
def test_a_damaged_file_is_refused_in_a_line(trials: int, seed: int, law: Law, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests/support/damage.py"), str(tmp_path), str(seed), str(trials)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == trials, done.stderr[-3000:]
    outcomes = [row["outcome"] for row in rows]
    assert outcomes.count("refused") > trials / 4, "too little of the damage is noticed"
    failures = [json.dumps(row, ensure_ascii=False) for row in rows if row["outcome"] not in ("read", "refused")]
    law(f"a damaged file is read or refused in one line: {trials:,} mutations, failures", failures)
