"""Rows of question sets as conversations: calculator calls agree with the calculator, letters with the choices."""

from typing import Any

import pytest

from quern.mixture.sources import to_messages, word_problem
from quern.text.chat import Message

ANSWER = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips.\n#### 72"


def reply(record: Any) -> Message:
    messages = to_messages(record)
    assert [message["role"] for message in messages] == ["user", "assistant"]
    return messages[1]


def test_marks_become_calls_of_the_calculator() -> None:
    row = {"question": "How many clips?", "answer": ANSWER}
    assert to_messages(row)[0] == {"role": "user", "content": "How many clips?"}
    assert reply(row)["content"] == [
        {"type": "text", "text": "Natalia sold 48/2 = "},
        {"type": "tool", "text": "48/2"},
        {"type": "output", "text": "24"},
        {"type": "text", "text": "24 clips in May.\nShe sold 48+24 = "},
        {"type": "tool", "text": "48+24"},
        {"type": "output", "text": "72"},
        {"type": "text", "text": "72 clips.\n#### 72"},
    ]


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
    with pytest.raises(ValueError, match=r"the answer is .*: give the number of one of the 4 choices, from 0, or its"):
        to_messages({"question": "Which?", "choices": ["a", "b", "c", "d"], "answer": answer})


def test_other_shapes_pass_through() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert to_messages({"messages": messages, "question": "?", "answer": "!"}) == messages == to_messages(messages)
    with pytest.raises(ValueError, match="it has only 'question'"):
        to_messages({"question": "?"})
