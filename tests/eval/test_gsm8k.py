"""GSM8K's files and the reading of numbers, and its problems as an environment."""

import gzip
import json
from decimal import Decimal
from pathlib import Path

import pytest

from quern.eval.gsm8k import is_right, last_number, problem
from quern.eval.task import question
from quern.rl.environment import draw_item
from quern.rl.environments import load_environment

ROWS = [
    {"question": f"What is {n} + 1?", "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"} for n in range(40)
]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10.", "10"),
        ("It is $1,080.00!", "1080"),
        ("#### 18", "18"),
        ("9-4", "4"),
        ("x = -5.5.", "-5.5"),
        ("-$3 or $-4", "-4"),
        (".5", "0.5"),
        ("12,345,678 people", "12345678"),
        ("1, 2 and 3", "3"),
        ("(2)-1", "1"),
        ("x = −3", "-3"),
        ("−$1,080", "-1080"),
        ("–3 °C", "-3"),
        ("9−4 or 9–4", "4"),
        ("12\u202f345\u2009678 people", "12345678"),
    ],
)
def test_numbers_are_read_by_value(text: str, value: str) -> None:
    assert last_number(text) == Decimal(value)
    assert is_right(question("?", value), text) and not is_right(question("?", "77"), text)


def test_a_text_without_a_number_is_wrong() -> None:
    assert last_number("I do not know.") is None and not is_right(question("?", "1"), "none")


def test_files_are_found_and_practised(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    text = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (tmp_path / "deep" / "train.jsonl.gz").write_bytes(gzip.compress(text))
    environment = load_environment("gsm8k", tmp_path)
    item = draw_item(environment, "3")
    assert item.answer in [str(n + 1) for n in range(40)] and item == draw_item(environment, "3")
    assert environment.reward(item, f"so ${item.answer}.00.") == 1 and environment.reward(item, "99") == 0
    (tmp_path / "train.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match="train has several files"):
        load_environment("gsm8k", tmp_path)
    (tmp_path / "train.jsonl").rename(tmp_path / "other.jsonl")
    (tmp_path / "deep" / "train.jsonl.gz").unlink()
    with pytest.raises(FileNotFoundError, match="name its folder with --rl.data, .* has none"):
        load_environment("gsm8k", tmp_path)


def test_a_damaged_line_is_named_and_the_folder_must_be() -> None:
    for row in ({"question": "a"}, {"question": "a", "answer": "#### many"}, {"question": "a", "answer": "12"}, []):
        with pytest.raises((ValueError, KeyError, TypeError)):
            problem(row)
    with pytest.raises(FileNotFoundError, match="gsm8k reads train.jsonl: name its folder with --rl.data$"):
        load_environment("gsm8k")
