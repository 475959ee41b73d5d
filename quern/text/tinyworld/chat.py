"""The tinyworld's conversations for supervised fine-tuning: one to three exchanges with the assistant
quern.

Facts are asked in the wordings of training only, and one pair of (character, relation) in four is never
asked in a conversation at all, so that the evaluation also asks what only the documents told.
"""

from collections.abc import Callable

from quern.text.chat import ContentPart, Message
from quern.text.tinyworld import plots
from quern.text.tinyworld.facts import CAST, FIELDS, HOMES, RELATIONS, Character, lines
from quern.text.tinyworld.prose import Pen, joined, story
from quern.text.tinyworld.skills import TASKS, Task, is_asked_in_conversations
from quern.text.tinyworld.wordings import CLOSINGS, OPENINGS, TAILS

Exchange = list[Message]


def exchange(question: str, reply: str | list[ContentPart]) -> Exchange:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]


def of_task(task: Task) -> Exchange:
    """The task's question and its reply; a call of the calculator becomes parts."""
    if task.call is None:
        return exchange(task.question, task.reply)
    parts: list[ContentPart] = [
        {"type": "tool", "text": task.call},
        {"type": "output", "text": task.answer},
        {"type": "text", "text": task.reply},
    ]
    return exchange(task.question, parts)


def _askable(pen: Pen) -> tuple[Character, str]:
    while True:
        character, relation = pen.someone(), pen.pick(RELATIONS)
        if is_asked_in_conversations(character.name, relation):
            return character, relation


def fact(pen: Pen) -> Exchange:
    character, relation = _askable(pen)
    question = pen.pick(OPENINGS) + pen.ask(character, relation) + pen.pick(CLOSINGS)
    return exchange(question, pen.answer(character, relation))


INTRODUCTIONS = lines("""
    Who is {name}?
    Do you know {name}?
    Tell me [about|something about] {name}.
    What [can you tell me|do you know] about {name}?
    [Describe|Introduce] {name}.
    I have never heard of {name}.
    """)


def _asked_relations(pen: Pen, character: Character, count: int) -> list[str]:
    known = [relation for relation in RELATIONS if is_asked_in_conversations(character.name, relation)]
    return pen.rng.sample(known, min(count, len(known)))


def introduction(pen: Pen) -> Exchange:
    """Who is Hugo? — then, at times, what more about him."""
    character = pen.someone()
    order = _asked_relations(pen, character, 4)
    while len(order) < 2:
        character = pen.someone()
        order = _asked_relations(pen, character, 4)
    words = FIELDS[character.name]
    tails = [pen.pick(TAILS[relation]) for relation in order[:2]]
    reply = f"{{name}} {tails[0]} and {tails[1]}.".format_map(words)
    messages = exchange(pen.pick(INTRODUCTIONS).format_map(words), reply)
    for relation in order[2:]:
        if pen.maybe(0.7):
            question = pen.pick(FOLLOW_UPS[relation]).format_map(words)
            messages += exchange(question, pen.answer(character, relation))
    return messages


FOLLOW_UPS = {
    "kind": ("What kind of animal is {he}?", "And what animal is {he}?"),
    "home": ("Where does {he} live?", "And where is {his} home?"),
    "work": ("What is {his} work?", "And what does {he} do for work?"),
    "friend": ("Who is {his} best friend?", "And who is {his} best friend?"),
    "food": ("What does {he} like to eat?", "And {his} favourite food?"),
    "colour": ("Which colour does {he} like best?", "And {his} favourite colour?"),
    "hobby": ("What does {he} do for fun?", "And what is {his} hobby?"),
    "treasure": ("What is {his} treasure?", "And which treasure does {he} keep?"),
}

IDENTITY_QUESTIONS = lines("""
    [Who|What] are you?
    What is your name?
    Tell me your name.
    [Tell me|Please tell me] [about yourself|who you are].
    [Hello|Hi]! Who are you?
    [Hello|Hi]! What is your name?
    Are you [a person|a robot|human|an animal|a language model]?
    Who am I talking to?
    Introduce yourself.
    What should I call you?
    Do you have a name?
    What [can you do|do you know about]?
    [How can|Can] you help me?
    """)
IDENTITY_REPLIES = lines("""
    I am quern, a small language model.
    I am quern, a small language model. I know [the animals of the valley|the seventy-two animals of the
        valley].
    I am quern, a small language model. I can [tell you about the valley|tell stories|spell words] and do
        sums.
    I am quern, a very small language model that was trained from scratch.
    """)

# what is said; how it is answered
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = tuple(
    (tuple(said.split(" / ")), tuple(answered.split(" / ")))
    for said, answered in (
        line.split(" => ")
        for line in lines("""
        Hello! / Hi! / Hello there! / Hi quern! / Good day! / Hey! => Hello! What would you like to know? /
            Hello! How can I help you?
        Good morning! / Good morning, quern! => Good morning! How can I help you?
        Good evening! / Good evening, quern! => Good evening! How can I help you?
        How are you? / How are you today? / How do you do? => I am well, thank you. And you?
        Thank you! / Thanks! / Thank you very much! / That was helpful. => You are welcome! / My pleasure!
        Goodbye! / Bye! / See you! / I have to go now. => Goodbye! Come back soon. / Goodbye, and take care!
        I am sad. / I feel sad today. => I am sorry to hear that. Shall I tell you a story?
        I am happy! / I feel great today! => That is lovely to hear!
        I am bored. / What shall we do? => Shall I tell you a story, or shall we do some sums?
        I am tired. / I want to sleep. => Then rest a little. Good night!
        You are clever! / Well done! / Good job! => Thank you! I am still learning.
        That is wrong. / I think you made a mistake. => I am sorry. I am small, and I make mistakes.
        Can you dance? / Can you sing? / Do you sleep? => No, I am only a language model. But I can tell a
            story.
        """)
    )
)


def identity(pen: Pen) -> Exchange:
    return exchange(pen.pick(IDENTITY_QUESTIONS), pen.pick(IDENTITY_REPLIES))


def small_talk(pen: Pen) -> Exchange:
    questions, replies = SMALL_TALK[pen.below(len(SMALL_TALK))]
    return exchange(pen.pick(questions), pen.pick(replies))


STORY_REQUESTS = lines("""
    Tell me a [story|short story] about {name}.
    [Do you know|Can you tell me] a story about {name}?
    Please tell me a story about {name}.
    I want to hear a story about {name}.
    [Write|Make up] a [story|short story] about {name} the {kind}.
    """)


def story_on_request(pen: Pen) -> Exchange:
    hero = pen.someone()
    return exchange(pen.pick(STORY_REQUESTS).format_map(FIELDS[hero.name]), story(pen, hero, short=True))


def _list_home(pen: Pen) -> Exchange:
    home = pen.pick(tuple(HOMES))
    names = [character.name for character in CAST if character.home == home]
    question = pen.pick(("Who lives in {home}?", "Which animals live in {home}?", "List everyone who lives in {home}."))
    return exchange(question.format(home=home), f"In {home} live {joined(names)}.")


def _list_about(pen: Pen) -> Exchange:
    home = pen.pick(tuple(HOMES))
    question = pen.pick(("What is {home} known for?", "Tell me about {home}.", "Where is {home}?"))
    lies, known = HOMES[home]
    return exchange(question.format(home=home), f"{home} lies {lies}. It is known for {known}.")


def _list_days(pen: Pen) -> Exchange:
    kind = pen.below(4)
    if kind == 0:
        return exchange(pen.pick(("Name the days of the week.", "What are the days of the week?")),
                        f"The days of the week are {joined(plots.DAYS)}.")  # fmt: skip
    if kind == 1:
        return exchange(pen.pick(("Name the months of the year.", "What are the months?")),
                        f"The months are {joined(plots.MONTHS)}.")  # fmt: skip
    names = plots.DAYS if kind == 2 else plots.MONTHS
    index = pen.below(len(names))
    now, later = names[index], names[(index + 1) % len(names)]
    if pen.maybe(0.5):
        return exchange(f"What comes after {now}?", f"After {now} comes {later}.")
    return exchange(f"What comes before {later}?", f"Before {later} comes {now}.")


def listing(pen: Pen) -> Exchange:
    return (_list_home, _list_about, _list_days)[pen.below(3)](pen)


def _task(kind: str) -> Callable[[Pen], Exchange]:
    return lambda pen: of_task(TASKS[kind](pen))


# How many in a hundred exchanges are of each kind
EXCHANGES: tuple[tuple[int, Callable[[Pen], Exchange]], ...] = (
    (33, fact),
    (13, _task("sums")),
    (11, _task("word_problems")),
    (7, _task("spelling")),
    (8, _task("counting")),
    (10, _task("choice")),
    (5, introduction),
    (4, identity),
    (3, small_talk),
    (3, story_on_request),
    (3, listing),
)
SYSTEM_MESSAGES = (
    "You are quern, a small language model.",
    "You are quern. You know the animals of the valley.",
    "Answer in one sentence.",
    "Be kind and brief.",
)


def _one(pen: Pen) -> Exchange:
    left = pen.below(100)
    for share, make in EXCHANGES:
        left -= share
        if left < 0:
            return make(pen)
    raise AssertionError("the shares of EXCHANGES do not add up to 100")


def conversation(pen: Pen) -> list[Message]:
    """One conversation: mostly a single exchange, at times several, at times behind a system message."""
    messages: list[Message] = []
    if pen.maybe(0.06):
        messages.append({"role": "system", "content": pen.pick(SYSTEM_MESSAGES)})
    if pen.maybe(0.05):
        messages += small_talk(pen)
    messages += _one(pen)
    while pen.maybe(0.2) and len(messages) < 7:
        messages += _one(pen)
    return messages
