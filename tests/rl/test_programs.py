"""Programs as answers: the check decides, in the sandbox, and damaged files give one clear error."""

from pathlib import Path

import pytest

from quern.rl.environment import load_environment, program_in
from tests.generate.sandbox.test_sandbox import opened
from tests.support.rows import write_rows

EXERCISES = [
    {"prompt": f"Write a Python function plus_{n}(x) that adds {n}.", "check": f"assert program.plus_{n}(2) == {2 + n}"}
    for n in range(30)
]


def test_a_program_is_rewarded_for_passing_its_check(tmp_path: Path) -> None:
    opened(1).close()  # skips where no sandbox works
    write_rows(tmp_path / "programs.jsonl", EXERCISES)
    environment = load_environment("programs", tmp_path)
    item = environment.ask("seed")
    number = int(item.answer.split("plus_")[1].split("(")[0])
    right = f"def plus_{number}(x):\n    return x + {number}\n"
    assert environment.reward(item, f"Here it is:\n```python\n{right}```\nDone.") == 1
    assert environment.reward(item, right) == 1
    for wrong in (right.replace("+", "-"), "print('passed')", "raise SystemExit(0)", "def (", ""):
        assert environment.reward(item, wrong) == 0
    assert environment.ask("seed") == item
    assert len({environment.ask(str(n)).answer for n in range(20)}) > 5


CODE = "def half(n):\n    return n / 2\n"
DOCSTRING = '"""\n```\nhalf(2)\n```\n"""\n'
INDENTED = 'def half(n):\n    """\n    ```\n    half(2)\n    ```\n    """\n    return n / 2\n'


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        (CODE, CODE),
        (f"So:\n```\n{CODE}```\nand\n```\ny\n```", CODE),
        (f"```py\n{CODE}", CODE),  # cut at the limit
        *((f"Look:\n```{info}\n{CODE}```\nIt halves.", CODE) for info in ("Python", "python3", "PY", " python ")),
        *((f"```{info}\n{CODE}```\n", CODE) for info in ('python title="half.py"', "{.python .lines}", "python3.11")),
        (f"Look:\n```python\n{CODE}```\nIt halves.".replace("\n", "\r\n"), CODE),
        ("1. First\n   ```python\n   def half(n):\n       return n / 2\n   ```\n", CODE),
        (f"````python\n{DOCSTRING}{CODE}````\nDone.", DOCSTRING + CODE),
        (f"~~~python\n{DOCSTRING}{CODE}~~~\nDone.", DOCSTRING + CODE),
        (f"```python\n{INDENTED}```\nDone.", INDENTED),
        (f"```sh\npip install half\n```\n```python\n{CODE}```", CODE),
        (f"```json\n{{}}\n```\n```\n{CODE}```", CODE),
        (f"```\n>>> half(2) == 1\nTrue\n```\n```Py\n{CODE}```", CODE),
        (f"<details>\n```python\n{CODE}```\n</details>", CODE),
        ("```\n    return n / 2\n```", "    return n / 2\n"),
        ("Use `half` and ```half```.", "Use `half` and ```half```."),
    ],
)
def test_the_program_of_a_reply(reply: str, program: str) -> None:
    assert program_in(reply) == program


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(FileNotFoundError, match="reads programs.jsonl: name its folder with --rl.data, .* none"):
            load_environment("programs", folder)
    write_rows(tmp_path / "old" / "programs.jsonl", EXERCISES)
    assert load_environment("programs", tmp_path).files == (tmp_path / "old" / "programs.jsonl",)
    for row, reason in (
        ({"prompt": "a"}, "the key 'check' is missing"),
        ({"prompt": None, "check": "assert program.a()"}, "the question is no text, or empty"),
        ({"prompt": "a", "check": None}, "the check is no text, or empty"),  # "None" would pass
        ({"prompt": "a", "check": " "}, "the check is no text, or empty"),
    ):
        write_rows(tmp_path / "programs.jsonl", [row])
        with pytest.raises(ValueError, match=f"line 1: no row of programs: {reason}"):
            load_environment("programs", tmp_path)
