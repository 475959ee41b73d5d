"""Programs as answers: the check decides, in the sandbox, and damaged files give one clear error."""

import json
from pathlib import Path

import pytest

from quern.generate.sandbox import Sandbox, SandboxError
from quern.rl.environments import load_environment
from quern.rl.environments.programs import FILE, program_in

EXERCISES = [
    {"prompt": f"Write a Python function plus_{n}(x) that adds {n}.", "check": f"assert program.plus_{n}(2) == {2 + n}"}
    for n in range(30)
]


def works() -> bool:
    try:
        Sandbox(workers=1).close()
    except SandboxError:
        return False
    return True


def write(folder: Path, lines: list[str]) -> Path:
    (folder / FILE).write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.mark.skipif(not works(), reason="no sandbox works on this machine")
def test_a_program_is_rewarded_for_passing_its_check(tmp_path: Path) -> None:
    environment = load_environment("programs", write(tmp_path, [json.dumps(one) for one in EXERCISES]))
    item = environment.ask("seed")
    number = int(item.answer.split("plus_")[1].split("(")[0])
    right = f"def plus_{number}(x):\n    return x + {number}\n"
    assert environment.reward(item, f"Here it is:\n```python\n{right}```\nDone.") == 1
    assert environment.reward(item, right) == 1
    for wrong in (right.replace("+", "-"), "print('passed')", "raise SystemExit(0)", "def (", ""):
        assert environment.reward(item, wrong) == 0
    assert environment.ask("seed") == item
    assert len({environment.ask(str(n)).answer for n in range(20)}) > 5


def test_the_program_of_a_reply() -> None:
    assert program_in("x = 1") == "x = 1"
    assert program_in("So:\n```\nx = 1\n```\nand\n```\ny\n```") == "x = 1\n"
    assert program_in("```py\nx = 1\n") == "x = 1\n"  # cut at the limit


@pytest.mark.parametrize("lines", [["{"], ["[]"], ['{"prompt": "a"}'], []])
def test_files_that_are_missing_or_damaged(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(ValueError, match="name the folder with programs.jsonl by --rl.data"):
        load_environment("programs", tmp_path)
    with pytest.raises(ValueError, match="line 1: each line is|has no exercises"):
        load_environment("programs", write(tmp_path, lines))
