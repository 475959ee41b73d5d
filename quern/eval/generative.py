"""Questions that the model answers in its own words, checked by a function: accuracy per kind of question.

The replies are greedy and batched through the Engine, whose rows do not depend on their neighbours: the
accuracy is the same at any batch size. Calls of tools run inside the Engine; what is checked is what the
assistant says, without the calls and their outputs.
What it is not: a source of questions (`quern.text.tinyworld.corpus`, `quern.eval.tasks`) or a judge (`check` is
handed in).
Units: accuracies are shares from 0 to 1.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quern.eval.score import Score, accuracy
from quern.generate.engine import Engine
from quern.generate.reply import Completion
from quern.generate.sample import GREEDY
from quern.text.chat import ContentPart, Message, render_prompt
from quern.text.tinyworld.corpus import Question


@dataclass(frozen=True)
class Answered:
    """One question as it was asked and answered; `parts` are the assistant's text, tool calls and outputs."""

    kind: str
    messages: list[Message]
    parts: list[ContentPart]
    text: str
    answer: str
    correct: bool


@dataclass(frozen=True)
class Graded:
    """`scores` holds one Score per kind, in the order in which the kinds first appear."""

    scores: list[Score]
    replies: list[Answered]


def generative(
    engine: Engine,
    questions: Sequence[Question],
    check: Callable[[Question, str], bool],
    *,
    task: str = "tinyworld",
    max_tokens: int = 96,
    batch_rows: int = 32,
) -> Graded:
    """Ask every question greedily and count the replies that `check(question, text)` accepts, by kind.

    A kind's task is named "<task>/<kind>". Raises ValueError when there is no question.
    """
    if not questions:
        raise ValueError(f"{task}: no questions to score; ask for at least one")
    prompts = [render_prompt(engine.tokenizer, question.messages) for question in questions]
    replies = [
        Answered(
            kind=question.kind,
            messages=question.messages,
            parts=list(completion.parts),
            text=completion.text,
            answer=question.answer,
            correct=bool(check(question, completion.text)),
        )
        for question, completion in zip(questions, _complete(engine, prompts, max_tokens, batch_rows), strict=True)
    ]
    scores = []
    for kind in dict.fromkeys(question.kind for question in questions):
        rows = [row for row, question in enumerate(questions) if question.kind == kind]
        scores.append(
            accuracy(
                f"{task}/{kind}",
                [replies[row].correct for row in rows],
                [questions[row].chance for row in rows],
                [prompts[row] for row in rows],
                bos=engine.tokenizer.bos,
            )
        )
    return Graded(scores, replies)


def _complete(engine: Engine, prompts: list[list[int]], max_tokens: int, batch_rows: int) -> Iterator[Completion]:
    """Greedy completions in the order of `prompts`. Prompts of like length share a batch: less padding."""
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    done: dict[int, Completion] = {}
    for first in range(0, len(order), batch_rows):
        rows = order[first : first + batch_rows]
        groups = engine.generate([prompts[row] for row in rows], max_tokens=max_tokens, sampling=GREEDY)
        done.update((row, samples[0]) for row, samples in zip(rows, groups, strict=True))
    return (done[row] for row in range(len(prompts)))
