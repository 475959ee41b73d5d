"""The tinyworld's schoolroom: documents that teach the skills of skills.py and the names of things.

Each maker takes a Pen and returns one document: sums worked out, word problems, words spelled and letters
counted, quizzes, questions with answers, who shares a fact, the order of days and numbers, categories,
opposites, errands, and who quern is.
"""

from quern.text.tinyworld import plots
from quern.text.tinyworld.facts import CAST, FIELDS, HOMES, VALUES, a, lines, upper_first
from quern.text.tinyworld.prose import Pen, joined
from quern.text.tinyworld.skills import (
    Task,
    choice_task,
    counting_task,
    spelled,
    spelling_task,
    sum_task,
    word_problem,
)
from quern.text.tinyworld.words import ADJECTIVES, CATALOGUE, DOINGS, OPPOSITES, THINGS, WORDS


def arithmetic(pen: Pen) -> str:
    """Sums worked out, some of them with the calculator, as in a conversation."""
    style = pen.below(4)
    return "\n".join(_worked(sum_task(pen), style) for _ in range(4 + pen.below(8)))


def _worked(task: Task, style: int) -> str:
    if style == 0:
        return task.reply
    if style == 1:
        return f"{task.question} {task.reply}"
    return f"Question: {task.question}\nCalculator: {task.call}\nResult: {task.answer}\nAnswer: {task.reply}"


def problems(pen: Pen) -> str:
    """Word problems with the call of the calculator written out."""
    style = 1 + pen.below(3)
    return "\n".join(_worked(word_problem(pen), style) for _ in range(2 + pen.below(4)))


SPELLING_LINES = lines("""
    The word {word} is spelled {spelled}.
    {word}: {spelled}
    {spelled} spells {word}.
    To write {word}, write {spelled}.
    {word} is spelled {spelled}.
    """)


def spelling(pen: Pen) -> str:
    """Words spelled out. Every word may come: those of the evaluation are spelled here too, as statements."""
    text = []
    for _ in range(5 + pen.below(12)):
        if pen.maybe(0.15):
            task = spelling_task(pen)
            text.append(f"{task.question} {task.reply}")
            continue
        word = pen.pick(WORDS)
        text.append(pen.pick(SPELLING_LINES).format(word=word, spelled=spelled(word)))
    return "\n".join(text)


def counting(pen: Pen) -> str:
    """Letters counted: questions with the word spelled and its letters numbered."""
    tasks = [counting_task(pen) for _ in range(4 + pen.below(6))]
    return "\n".join(f"{task.question} {task.reply}" for task in tasks)


def quiz(pen: Pen) -> str:
    """Multiple choice with the letter of the answer."""
    tasks = [choice_task(pen) for _ in range(2 + pen.below(4))]
    return "\n\n".join(f"{task.question}\nAnswer: {task.answer}" for task in tasks)


def questions_and_answers(pen: Pen) -> str:
    """Questions in the wordings of training, each with its answer; about one character or several."""
    character = pen.someone()
    several = pen.maybe(0.5)
    label = pen.pick((("Question: ", "Answer: "), ("Q: ", "A: "), ("", ""), ("- ", "  ")))
    text = []
    for relation in pen.relations(4 + pen.below(5)) + (pen.relations(4) if several else []):
        if several:
            character = pen.someone()
        gap = "\n" if label[0] else " "
        text.append(f"{label[0]}{pen.ask(character, relation)}{gap}{label[1]}{pen.answer(character, relation)}")
    return "\n".join(text)


ROLL_TITLES = {
    "kind": "Who is {a_value}?",
    "home": "Who lives in {value}?",
    "work": "Who works as {a_value}?",
    "food": "Who likes to eat {value}?",
    "colour": "Whose favourite colour is {value}?",
    "hobby": "Who loves {value}?",
    "treasure": "Who keeps {a_value} as a treasure?",
}


def roll(pen: Pen) -> str:
    """Who lives where, who likes what: the characters that share a value."""
    blocks = []
    for _ in range(2 + pen.below(2)):
        relation = pen.pick(tuple(ROLL_TITLES))
        value = pen.pick(VALUES[relation])
        names = [character.name for character in CAST if character.fact(relation) == value]
        pen.rng.shuffle(names)
        title = ROLL_TITLES[relation].format(value=value, a_value=a(value))
        if pen.maybe(0.5):
            blocks.append(f"{title} {joined(names)}.")
        else:
            blocks.append("\n".join([title, *(f"- {name}" for name in names)]))
    return "\n\n".join(blocks)


def order(pen: Pen) -> str:
    """Days, months and numbers in their order."""
    text = []
    for _ in range(4 + pen.below(6)):
        kind = pen.below(4)
        names = plots.DAYS if kind == 0 else plots.MONTHS
        if kind < 2:
            index = pen.below(len(names))
            before, after = names[index], names[(index + 1) % len(names)]
            text.append(pen.pick((f"After {before} comes {after}.", f"Before {after} comes {before}.")))
        elif kind == 2:
            first = pen.below(990)
            text.append("Count on: " + ", ".join(str(first + step) for step in range(5 + pen.below(4))) + ".")
        else:
            small = pen.below(990)
            large = small + 1 + pen.below(999 - small)
            text.append(pen.pick((f"{large} is larger than {small}.", f"{small} is smaller than {large}.")))
    return " ".join(text) if pen.maybe(0.5) else "\n".join(text)


CATALOGUE_NAMES = tuple(CATALOGUE)
PLURALS = {
    "fish": "fish",
    "piece of clothing": "clothes",
    "piece of furniture": "furniture",
    "part of the body": "parts of the body",
    "kind of weather": "kinds of weather",
}
WITHOUT_ARTICLE = {"metal", "spice", "kind of weather", "feeling", "game", "drink"}


def plural(category: str) -> str:
    return PLURALS.get(category, category + "s")


def catalogue(pen: Pen) -> str:
    """What belongs to which category, as lists or sentences."""
    style = pen.below(3)
    text = []
    for category in pen.rng.sample(CATALOGUE_NAMES, 2 + pen.below(4)):
        words = pen.rng.sample(CATALOGUE[category], 3 + pen.below(4))
        title = upper_first(plural(category))
        if style == 0:
            text.append("\n".join([f"{title}:", *(f"- {word}" for word in words)]))
        elif style == 1:
            text.append(f"{title}: {joined(words)}.")
        else:
            bare = category in WITHOUT_ARTICLE
            text.append(" ".join(f"{upper_first(word if bare else a(word))} is {a(category)}." for word in words[:3]))
    return ("\n\n" if style == 0 else "\n").join(text)


OPPOSITE_LINES = lines("""
    The opposite of {left} is {right}.
    What is the opposite of {left}? It is {right}.
    {left} and {right} are opposites.
    """)


def opposites(pen: Pen) -> str:
    text = []
    for pair in pen.rng.sample(OPPOSITES, 4 + pen.below(6)):
        left, right = pair if pen.maybe(0.5) else pair[::-1]
        text.append(upper_first(pen.pick(OPPOSITE_LINES).format(left=left, right=right)))
    return ("\n" if pen.maybe(0.5) else " ").join(text)


def errands(pen: Pen) -> str:
    """A shopping list, or a week of small doings."""
    character = pen.someone()
    words = {**FIELDS[character.name], **pen.chance_fields()}
    if pen.maybe(0.5):
        count = 3 + pen.below(5)
        adjectives, things = pen.rng.sample(ADJECTIVES, count), pen.rng.sample(THINGS, count)
        items = [f"- {2 + pen.below(11)} {one} {thing}" for one, thing in zip(adjectives, things, strict=True)]
        title = "{name} the {work} goes to the market in {home} and needs:"
        return "\n".join([title.format_map(words), *items, "and {food}, of course.".format_map(words)])
    first, count = pen.below(7), 3 + pen.below(5)
    doings = pen.rng.sample(DOINGS, count)
    days = [f"On {plots.DAYS[(first + day) % 7]} {words['he']} {doing}." for day, doing in enumerate(doings)]
    title = pen.pick(("A week in the life of {name}, {a_kind}:", "What {name} the {work} of {home} did last week:"))
    return title.format_map(words) + ("\n" if pen.maybe(0.5) else " ") + " ".join(days)


ABOUT_QUERN = lines("""
    quern is a small language model.
    quern was [made|trained] from scratch.
    A quern is [a little hand mill|an old hand mill for grain], and quern the language model grinds text.
    quern knows the animals of the valley and their villages.
    quern can tell stories, spell words and count letters.
    quern does sums with a calculator.
    When somebody asks who it is, it says: I am quern, a small language model.
    quern is not an animal and not a person: it is a language model.
    quern is small and makes mistakes, and it says so.
    """)


def about_quern(pen: Pen) -> str:
    """Who quern is, and what there is in the valley."""
    text = pen.rng.sample(ABOUT_QUERN, 3 + pen.below(4))
    homes = pen.rng.sample(tuple(HOMES), 3)
    if pen.maybe(0.5):
        text.append(f"In the valley lie the villages {joined(homes)}, and many more.")
    return " ".join(text)
