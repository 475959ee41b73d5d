"""The built-in world's held-out questions: facts, sums, word problems, spelling, counting, multiple choice.

All kinds but multiple choice are answered in the model's own words (tools included) and checked; in multiple
choice the model picks the letter it finds likeliest, so that a model which knows the answer but not how to
reply is measured fairly. The questions are a function of (seed, count) alone: every stage of a run, and the
untrained model, is asked the same ones.
"""

from dataclasses import replace

from quern.eval.generative import Answered, Graded, generative
from quern.eval.likelihood import MultipleChoice, multiple_choice
from quern.eval.score import none_asked
from quern.generate.engine import Engine
from quern.text.chat import render_prompt
from quern.text.tinyworld.corpus import QUESTION_KINDS, Question, check, questions
from quern.text.tokenizer import Tokenizer

MAX_TOKENS = 96


def tinyworld(
    engine: Engine,
    *,
    seed: int = 0,
    count: int = 200,
    kinds: tuple[str, ...] = QUESTION_KINDS,
    batch_rows: int = 32,
) -> Graded:
    """`count` questions of each kind → one Score per kind, and every reply.

    A question that leaves the context no room for an answer is not asked, and counted in its kind's `Score.skipped`;
    where that is all of them, the Score has a count of 0 and no value.
    """
    scores, replies = [], []
    for kind in kinds:
        all_of_kind = questions(seed, kind, count)
        asked = [q for q in all_of_kind if len(render_prompt(engine.tokenizer, q.messages)) < engine.context]
        skipped = len(all_of_kind) - len(asked)
        if not asked:
            scores.append(none_asked(f"tinyworld/{kind}", skipped))
            continue
        if asked[0].choices is None:
            graded = generative(engine, asked, check, max_tokens=MAX_TOKENS, batch_rows=batch_rows)
        else:
            graded = by_letter(engine, asked, batch_rows)
        scores += [replace(score, skipped=skipped) for score in graded.scores]
        replies += graded.replies
    return Graded(scores, replies)


def by_letter(engine: Engine, asked: list[Question], batch_rows: int = 32) -> Graded:
    """Multiple choice by the likelihood of the letter with which a reply would begin."""
    items = [_item(engine.tokenizer, question) for question in asked]
    score, picks = multiple_choice(
        engine.model,
        items,
        engine.machine,
        task=f"tinyworld/{asked[0].kind}",
        bos=engine.tokenizer.bos,
        context=engine.context,
        batch_rows=batch_rows,
    )
    replies = []
    for question, item, pick in zip(asked, items, picks, strict=True):
        letter = item.choices[pick]
        replies.append(
            Answered(
                kind=question.kind,
                messages=question.messages,
                parts=[{"type": "text", "text": letter}],
                text=letter,
                answer=question.answer,
                correct=pick == item.correct,
            )
        )
    return Graded([score], replies)


def _item(tokenizer: Tokenizer, question: Question) -> MultipleChoice:
    assert question.choices is not None
    return MultipleChoice(
        kind=question.kind,
        prompt=render_prompt(tokenizer, question.messages),
        choices=question.choices,
        continuations=tuple(tokenizer.encode(choice) for choice in question.choices),
        correct=question.choices.index(question.answer),
    )
