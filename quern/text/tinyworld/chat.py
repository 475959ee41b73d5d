"""The tinyworld's conversations for supervised fine-tuning: one to about six exchanges with the assistant
quern, mostly one or two.

People type small talk as they do, with slips; what an evaluation says has slips that no conversation has.

Conversations ask in the wordings of training only. One pair of (character, relation) in four is never asked in a
conversation, so the evaluation also asks for facts that only the documents tell.
"""

import re
from collections.abc import Callable, Sequence

from quern.text.chat import ContentPart, Message
from quern.text.tinyworld import skills, world
from quern.text.tinyworld.prose import Pen, joined, story
from quern.text.tinyworld.skills import EXERCISES, Exchange, Exercise, bucket, exchange, is_asked_in_conversations
from quern.text.tinyworld.world import CAST, FIELDS, HOMES, RELATIONS, upper_first

_W = world.wordings("chat")


def of_exercise(exercise: Exercise) -> Exchange:
    """The question and the reply of an exercise. A call of the calculator becomes parts."""
    if exercise.call is None:
        return exchange(exercise.question, exercise.reply)
    parts: list[ContentPart] = [
        {"type": "tool", "text": exercise.call},
        {"type": "output", "text": exercise.answer},
        {"type": "text", "text": exercise.reply},
    ]
    return exchange(exercise.question, parts)


def fact(pen: Pen) -> Exchange:
    character, relation = skills.askable(pen)
    name = character.name
    asked = upper_first(pen.say("questions", character, relation).replace(name, pen.pick(world.EPITHETS) + name))
    question = pen.pick(world.OPENINGS) + asked + pen.pick(world.CLOSINGS)
    return exchange(question, pen.say("answers", character, relation))


def introduction(pen: Pen) -> Exchange:
    """Who is Hugo? Then, sometimes, a few more questions about him."""
    order: list[str] = []
    while len(order) < 2:
        character = pen.someone()
        known = [relation for relation in RELATIONS if is_asked_in_conversations(character.name, relation)]
        order = pen.rng.sample(known, min(4, len(known)))
    tails = [pen.say("tails", character, relation) for relation in order[:2]]
    question = pen.pick(_W["introductions"]).format_map(FIELDS[character.name])
    messages = exchange(question, f"{character.name} {tails[0]} and {tails[1]}.")
    for relation in order[2:]:
        if pen.maybe(0.7):
            messages += exchange(*(pen.say(what, character, relation) for what in ("follow_ups", "answers")))
    return messages


COMMON = 3  # the first groups of small talk, greetings, help and thanks, make up half of it
SMALL_TALK = (*_W["small_talk"], {"said": _W["identity_questions"], "reply": _W["identity_replies"]})
"""Groups of what people say when they mean the same, with the replies that fit."""
_SAID = frozenset(re.findall(r"\w+", " ".join(said for talk in SMALL_TALK for said in talk["said"]).lower()))
_SLIP = re.compile(r"(?<=[A-Za-z])[a-z]{2}")


def _typed(pen: Pen, said: str, slip: bool) -> str:
    """Types a sentence as people do: often in lower case or without its end. A slip is two letters swapped, one missing
    or one twice, where there is room."""
    text = said.lower() if pen.maybe(0.5) else said
    text = text[:-1] if pen.maybe(0.5) and len(text) > 1 else text
    places = [match.start() for match in _SLIP.finditer(text)]
    if slip and places:
        at = pen.pick(places)
        a, b = text[at : at + 2]
        text = text[:at] + pen.pick((b + a, a, a + a + b)) + text[at + 2 :]
    return text


def _is_held_out(typed: str) -> bool:
    """A hash holds a quarter of the words with a slip out for the evaluation."""
    return any(word not in _SAID and bucket(f"type {word}", 4) == 0 for word in _plain(typed).split())


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _say(pen: Pen, wordings: Sequence[str]) -> str:
    while _is_held_out(typed := _typed(pen, pen.pick(wordings), pen.maybe(0.5))):
        pass
    return typed


def identity(pen: Pen) -> Exchange:
    return exchange(_say(pen, _W["identity_questions"]), pen.pick(_W["identity_replies"]))


def small_talk(pen: Pen) -> Exchange:
    groups = _W["small_talk"]
    talk = pen.pick(groups[:COMMON] if pen.maybe(0.4) else groups)
    return exchange(_say(pen, talk["said"]), pen.pick(talk["reply"]))


def held_out_small_talk(pen: Pen) -> Exercise:
    """Something that no conversation says in this spelling; its answer is one of the replies that fit."""
    while True:
        talk = pen.pick(SMALL_TALK)
        typed = _typed(pen, pen.pick(talk["said"]), slip=True)
        if _is_held_out(typed) and not re.search(r"[!?.] ", typed):
            reply = pen.pick(talk["reply"])
            return Exercise("small_talk", typed, reply, reply, chance=1 / len(SMALL_TALK))


def fits(reply: str, known: str) -> bool:
    """Whether a reply is one of those that fit where the known reply does; case and punctuation are ignored."""
    groups = [{_plain(text) for text in talk["reply"]} for talk in SMALL_TALK]
    return any({_plain(reply), _plain(known)} <= group for group in groups)


def story_on_request(pen: Pen) -> Exchange:
    hero = pen.someone()
    return exchange(pen.pick(_W["story_requests"]).format_map(FIELDS[hero.name]), story(pen, hero, short=True))


def _days(pen: Pen) -> Exchange:
    kind = pen.below(4)
    if kind == 0:
        return exchange(pen.pick(_W["days_questions"]), f"The days of the week are {joined(world.DAYS)}.")
    if kind == 1:
        return exchange(pen.pick(_W["months_questions"]), f"The months are {joined(world.MONTHS)}.")
    names = world.DAYS if kind == 2 else world.MONTHS
    index = pen.below(len(names))
    now, later = names[index], names[(index + 1) % len(names)]
    if pen.maybe(0.5):
        return exchange(f"What comes after {now}?", f"After {now} comes {later}.")
    return exchange(f"What comes before {later}?", f"Before {later} comes {now}.")


def listing(pen: Pen) -> Exchange:
    """The inhabitants of a village, what it is known for, or the order of days and months."""
    about = pen.pick(("inhabitants", "village", "days"))
    if about == "days":
        return _days(pen)
    home = pen.pick(tuple(HOMES))
    question = pen.pick(_W[f"{about}_questions"]).format(home=home)
    if about == "village":
        lies, known = HOMES[home]
        return exchange(question, f"{home} lies {lies}. It is known for {known}.")
    names = [character.name for character in CAST if character.home == home]
    return exchange(question, f"In {home} live {joined(names)}.")


def _exercise(kind: str) -> Callable[[Pen], Exchange]:
    return lambda pen: of_exercise(EXERCISES[kind](pen))


# The percentage of exchanges of each kind
EXCHANGES: tuple[tuple[int, Callable[[Pen], Exchange]], ...] = (
    (24, fact),
    (7, _exercise("sums")),
    (7, _exercise("word_problems")),
    (8, _exercise("spelling")),
    (14, _exercise("counting")),
    (10, _exercise("choice")),
    (10, skills.options),
    (2, skills.about_letters),
    (3, skills.dictionary),
    (4, introduction),
    (3, identity),
    (5, small_talk),
    (1, story_on_request),
    (2, listing),
)


def conversation(pen: Pen) -> list[Message]:
    """One conversation: mostly a single exchange, sometimes several, sometimes after a system message."""
    messages: list[Message] = []
    if pen.maybe(0.06):
        messages.append({"role": "system", "content": pen.pick(_W["system_messages"])})
    if pen.maybe(0.3):
        messages += small_talk(pen)
    messages += pen.pick_by_share(EXCHANGES)[-1](pen)
    while pen.maybe(0.2) and len(messages) < 7:
        messages += pen.pick_by_share(EXCHANGES)[-1](pen)
    return messages
