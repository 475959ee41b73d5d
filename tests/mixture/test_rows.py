"""Rows of question sets as conversations: calculator calls agree with the calculator, letters with the choices. Test
rows are found wherever they are copied to, and nothing else is."""

from pathlib import Path
from typing import Any

import pytest

from quern.mixture.prepare import TaskRows, built_in_rows
from quern.mixture.sources import to_messages, word_problem
from quern.text.chat import ContentPart, Message
from quern.text.tinyworld import corpus
from tests.support.rows import write_rows

ANSWER = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips.\n#### 72"


def reply(record: Any) -> Message:
    messages = to_messages(record)
    assert [message["role"] for message in messages] == ["user", "assistant"]
    return messages[1]


def test_marks_become_calls_of_the_calculator() -> None:
    row = {"question": "How many clips?", "answer": ANSWER}
    assert to_messages(row)[0] == {"role": "user", "content": "How many clips?"}
    first = [("text", "Natalia sold 48/2 = "), ("tool", "48/2"), ("output", "24")]
    then = [("text", "24 clips in May.\nShe sold 48+24 = "), ("tool", "48+24"), ("output", "72")]
    expected = [*first, *then, ("text", "72 clips.\n#### 72")]
    assert reply(row)["content"] == [{"type": kind, "text": text} for kind, text in expected]


@pytest.mark.parametrize(
    ("mark", "output"),
    [
        ("<<12/60=0.2>>", "0.2"),
        ("<<1/2=.50>>", "0.5"),
        ("<<1,000*2=2,000>>", "2000"),
        ("<<5*4=$20>>", "20"),
        ("<<2*3=7>>", None),  # wrong
        ("<<100/3=33.33>>", None),  # rounded
        ("<<x=5>>", None),  # no arithmetic
    ],
)
def test_a_mark_that_the_calculator_contradicts_stays_text(mark: str, output: str | None) -> None:
    found = word_problem(f"It is {mark}so.")
    if output is None:
        assert found == [{"type": "text", "text": "It is so."}]
    else:
        assert [part["text"] for part in found] == ["It is ", mark[2:].split("=")[0], output, "so."]


def test_multiple_choice_is_asked_with_letters() -> None:
    row = {"question": "Which is red?", "choices": ["grass", "blood", "snow", "coal"], "answer": 1}
    assert to_messages(row)[0]["content"] == "Which is red?\nA) grass\nB) blood\nC) snow\nD) coal"
    assert reply(row)["content"] == "B" == reply(row | {"answer": "B"})["content"]
    assert to_messages(row | {"choices": ["a", "b"]})[0]["content"] == "Which is red?\nA) a\nB) b"


@pytest.mark.parametrize("answer", [4, -1, "E"])
def test_an_answer_that_is_no_choice(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"the answer is .*: give one of the 4 choices by number, from 0, or letter"):
        to_messages({"question": "Which?", "choices": ["a", "b", "c", "d"], "answer": answer})


@pytest.mark.parametrize("choices", [{"text": ["a", "b"], "label": ["A", "B"]}, '["a", "b"]'])
def test_choices_of_another_form_are_not_left_out(choices: Any) -> None:
    with pytest.raises(ValueError, match='its "choices" are (dict|str): give a list of texts, in .jsonl or .parquet'):
        to_messages({"question": "Which?", "choices": choices, "answer": "B"})


def test_other_shapes_pass_through() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert to_messages({"messages": messages, "question": "?", "answer": "!"}) == messages == to_messages(messages)
    with pytest.raises(ValueError, match="it has only 'question'"):
        to_messages({"question": "?"})


# Test rows ------------------------------------------------------------------------------------------------------------


LONG = "Janet’s ducks lay 16 eggs per day, and she eats three for breakfast every morning."
CODE = '''from typing import List


def close(numbers: List[float], threshold: float) -> bool:
    """ Are any two numbers closer to each other than the threshold? """
'''


def asked(text: str, reply: str = "Fine.") -> list[Message]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]


@pytest.fixture
def rows() -> TaskRows:
    found = TaskRows()
    for number, question in enumerate((f"Question: {LONG}", CODE, "What is 12 + 7?")):
        found.add(question, f"row {number}")
    return found


@pytest.mark.parametrize(
    ("messages", "row"),
    [
        (asked(LONG), "row 0"),
        (asked(f"Solve this.\n\n{LONG.upper()}\nA) 1\nB) 2"), "row 0"),
        (asked("Give me a problem.", f"Here it is: {LONG.replace(', ', ' -- ').replace('--', '')}"), "row 0"),
        (asked("hello", "hi") + asked(LONG.replace(" ", "\n")), "row 0"),
        (asked(f"Complete the function.\n```python\n{CODE}```"), "row 1"),
        (asked("what is  12+7"), "row 2"),
        (asked(LONG.replace("16", "17")), None),
        (asked("What is 12 - 7?"), None),
        (asked("Tell me: what is 12 + 7?"), None),  # a short question counts as a whole message only
        (asked("Say it.", "What is 12 + 7?"), None),
    ],
)
def test_what_is_found(rows: TaskRows, messages: list[Message], row: str | None) -> None:
    assert rows.find(messages) == row


def test_calls_and_outputs_are_read_too(rows: TaskRows) -> None:
    content: list[ContentPart] = [{"type": "text", "text": LONG[:18]}, {"type": "tool", "text": LONG[18:]}]
    assert rows.find([{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]) == "row 0"


def test_files_of_the_shapes_of_tasks(tmp_path: Path) -> None:
    def text(topic: str) -> str:
        return f"This is a long enough question about {topic}, is it not?"

    for name, row in {
        "gsm8k/test.jsonl.gz": {"question": text("eggs"), "answer": "#### 1"},
        "gsm8k/train.jsonl.gz": {"question": text("training"), "answer": "#### 1"},
        "HumanEval.jsonl": {"task_id": "HumanEval/0", "prompt": text("code"), "test": "…"},
        "core/arc.jsonl": {"query": f"Question: {text('plants')}", "choices": ["a", "b"], "gold": 0},
        "mmlu.jsonl": {"question": "Which is wet?", "choices": ["the sea", "the sand at noon"], "answer": 0},
        "arc.jsonl": {"question": "Which is hot?", "choices": {"text": ["the sun", "ice"], "label": ["A", "B"]}},
        "core/lambada.jsonl": {"context": text("rain"), "continuation": "wet"},
        "core/winograd.jsonl": {"context_options": [text("cups"), text("jugs")], "continuation": "x", "gold": 0},
        "talk.jsonl": {"messages": asked(text("talking")) + asked("Thank you!")},
    }.items():
        write_rows(tmp_path / name, [row])
    rows = TaskRows()
    rows.read(tmp_path, "--sft.tests")
    for topic in ("eggs", "code", "plants", "rain", "cups", "jugs", "talking"):
        assert rows.find(asked(text(topic))), topic
    assert rows.find(asked(text("eggs"))) == f"{tmp_path}/gsm8k/test.jsonl.gz, line 1 (--sft.tests)"
    assert rows.find(asked("Pick one. Which is wet?\n(A) The sea\n(B) The sand at noon")), "by its options"
    assert rows.find(asked("Which is wet?\nA) milk\nB) sand in the desert at noon")) is None
    assert rows.find(asked("Which is hot?\nA) the sun\nB) ice")), "by its options"
    assert rows.find(asked("Which is wet?")) is None, "without its options, others ask the same"
    assert rows.find(asked("Which is hot?")) is None
    assert rows.find(asked("Thank you!")) is None
    assert rows.find(asked(text("training"))) is None and rows.find(asked("Fine.")) is None
    write_rows(tmp_path / "wrong.jsonl", [{"text": "?"}])
    with pytest.raises(ValueError, match=r"wrong.jsonl, line 1: no test row: it has none of question, query, prompt"):
        rows.read(tmp_path, "--sft.tests")


def test_the_built_in_worlds_training_holds_no_question_of_its_evaluation() -> None:
    rows = TaskRows()
    built_in_rows(rows, 3)
    for question in corpus.questions(3, "facts", 20) + corpus.questions(3, "spelling", 20):
        assert rows.find([{"role": "user", "content": question.question}])
    found = (rows.find(messages) for messages in corpus.conversations(3, 3000, "train"))
    assert not any(found)
