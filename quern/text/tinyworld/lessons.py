"""The tinyworld's lessons: documents that teach the skills of skills.py and the names of things. Each function takes a
Pen and returns one document.
"""

from quern.text.tinyworld import skills, world
from quern.text.tinyworld.prose import Pen, joined
from quern.text.tinyworld.world import CAST, FIELDS, HOMES, RELATIONS, VALUES, WORDS, a, upper_first

_W, _T = world.wordings("lessons"), world.table("lessons")


def arithmetic(pen: Pen) -> str:
    """Solved sums, some of them with the calculator, as in a conversation."""
    style = pen.below(4)
    return "\n".join(_worked(skills.sum_exercise(pen), style) for _ in range(4 + pen.below(8)))


def _worked(one: skills.Exercise, style: int) -> str:
    if style == 0:
        return one.reply
    if style == 1:
        return f"{one.question} {one.reply}"
    return f"Question: {one.question}\nCalculator: {one.call}\nResult: {one.answer}\nAnswer: {one.reply}"


def problems(pen: Pen) -> str:
    """Word problems with their replies, some with the call of the calculator."""
    style = 1 + pen.below(3)
    return "\n".join(_worked(skills.word_problem(pen), style) for _ in range(2 + pen.below(4)))


def spelling(pen: Pen) -> str:
    """Spelled words. The words of the evaluation are spelled here too, as statements."""
    text = []
    for _ in range(5 + pen.below(12)):
        if pen.maybe(0.15):
            text.append(_worked(skills.spelling_exercise(pen), 1))
            continue
        word = pen.pick(WORDS)
        text.append(pen.pick(_W["spelling_lines"]).format(word=word, spelled=skills.spelled(word)))
    return "\n".join(text)


def counting(pen: Pen) -> str:
    """Questions for the number of letters, with the word spelled and its letters numbered; also of letters in a row.

    Nothing but copying predicts mixed letters, so a model that numbers them can number the letters of any word.
    """
    return "\n".join(
        _mixed_letters(pen) if pen.maybe(0.5) else _worked(skills.counting_exercise(pen), 1)
        for _ in range(5 + pen.below(6))
    )


def _mixed_letters(pen: Pen) -> str:
    """The letters of a word of training in another order: shown, then numbered."""
    while True:
        word = pen.pick(skills.TRAIN_WORDS)
        mixed = "".join(pen.rng.sample(word, len(word)))
        if mixed not in WORDS:
            break
    letter = None if pen.maybe(0.4) else pen.pick(mixed)
    what = "letters" if letter is None else f"letter {letter}"
    return f"Count the {what} in {skills.spelled(mixed)}. {skills.count_shown(mixed, letter)}"


def quiz(pen: Pen) -> str:
    """Multiple choice with the letter of the answer and its option; lists of which several letters are asked."""
    text = []
    for _ in range(2 + pen.below(4)):
        if pen.maybe(0.5):
            messages = [str(message["content"]) for message in skills.options(pen)]
            text.append("\n".join(f"{ask}\nAnswer: {reply}" for ask, reply in zip(*[iter(messages)] * 2, strict=True)))
        else:
            exercise = skills.choice_exercise(pen)
            text.append(f"{exercise.question}\nAnswer: {exercise.reply}")
    return "\n\n".join(text)


def questions_and_answers(pen: Pen) -> str:
    """Questions with answers about one character or several, in the wordings of training."""
    character = pen.someone()
    several = pen.maybe(0.5)
    label = pen.pick((("Question: ", "Answer: "), ("Q: ", "A: "), ("", ""), ("- ", "  ")))
    text = []
    for relation in pen.relations(4 + pen.below(5)) + (pen.relations(4) if several else []):
        if several:
            character = pen.someone()
        gap = "\n" if label[0] else " "
        question, answer = (pen.say(what, character, relation) for what in ("questions", "answers"))
        text.append(f"{label[0]}{question}{gap}{label[1]}{answer}")
    return "\n".join(text)


def roll(pen: Pen) -> str:
    """The characters that share a value: who lives where, who likes what."""
    blocks = []
    for _ in range(2 + pen.below(2)):
        relation = pen.pick(tuple(_T["roll_titles"]))
        value = pen.pick(VALUES[relation])
        names = [character.name for character in CAST if character.fact(relation) == value]
        pen.rng.shuffle(names)
        title = _T["roll_titles"][relation].format(value=value, a_value=a(value))
        listed = "\n".join([title, *(f"- {name}" for name in names)])
        blocks.append(f"{title} {joined(names)}." if pen.maybe(0.5) else listed)
    return "\n\n".join(blocks)


def order(pen: Pen) -> str:
    """Days, months and numbers in their order."""
    text = []
    for _ in range(4 + pen.below(6)):
        kind = pen.below(4)
        names = world.DAYS if kind == 0 else world.MONTHS
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


def catalogue(pen: Pen) -> str:
    """The words of some categories, as lists or sentences."""
    style = pen.below(3)
    text = []
    for category in pen.rng.sample(tuple(world.CATALOGUE), 2 + pen.below(4)):
        words = pen.rng.sample(world.CATALOGUE[category], 3 + pen.below(4))
        title = upper_first(_T["plurals"].get(category, f"{category}s"))
        if style == 0:
            text.append("\n".join([f"{title}:", *(f"- {word}" for word in words)]))
        elif style == 1:
            text.append(f"{title}: {joined(words)}.")
        else:
            bare = category in _T["without_article"]
            text.append(" ".join(f"{upper_first(word if bare else a(word))} is {a(category)}." for word in words[:3]))
    return ("\n\n" if style == 0 else "\n").join(text)


def opposites(pen: Pen) -> str:
    text = []
    for pair in pen.rng.sample(world.OPPOSITES, 4 + pen.below(6)):
        left, right = pair if pen.maybe(0.5) else pair[::-1]
        text.append(upper_first(pen.pick(_W["opposite_lines"]).format(left=left, right=right)))
    return ("\n" if pen.maybe(0.5) else " ").join(text)


def errands(pen: Pen) -> str:
    """A shopping list, or a week of short activities."""
    words = {**FIELDS[pen.someone().name], **pen.chance_fields()}
    if pen.maybe(0.5):
        count = 3 + pen.below(5)
        adjectives, things = pen.rng.sample(world.ADJECTIVES, count), pen.rng.sample(world.THINGS, count)
        items = [f"- {2 + pen.below(11)} {one} {thing}" for one, thing in zip(adjectives, things, strict=True)]
        title = "{name} the {work} goes to the market in {home} and needs:"
        return "\n".join([title.format_map(words), *items, "and {food}, of course.".format_map(words)])
    first, count = pen.below(7), 3 + pen.below(5)
    doings = pen.rng.sample(world.DOINGS, count)
    days = [f"On {world.DAYS[(first + day) % 7]} {words['he']} {doing}." for day, doing in enumerate(doings)]
    title = pen.pick(("A week in the life of {name}, {a_kind}:", "What {name} the {work} of {home} did last week:"))
    return title.format_map(words) + ("\n" if pen.maybe(0.5) else " ") + " ".join(days)


def shelves(pen: Pen) -> str:
    """Things in lettered places, and the same lines twice more, each time in another order.

    The words and the orders are random, so nothing but copying from the list predicts the lines that follow it. A model
    that has learned to copy can say a letter of a list, and name a word that it was never asked about.
    """
    blocks = []
    for _ in range(2 + pen.below(3)):
        things = pen.rng.sample(WORDS if pen.maybe(0.6) else VALUES[pen.pick(RELATIONS)], 3 + pen.below(3))
        blocks += [pen.pick(_W["shelves_titles"]), skills.lettered(things)]
        for _ in range(2):
            again = pen.rng.sample(things, len(things))
            blocks += [pen.pick(_W["shelves_again"]), *(skills.line_of(things, thing) for thing in again)]
    return "\n".join(blocks)


def about_quern(pen: Pen) -> str:
    """Facts about quern, and the villages of the valley."""
    text = pen.rng.sample(_W["about_quern"], 3 + pen.below(4))
    homes = pen.rng.sample(tuple(HOMES), 3)
    if pen.maybe(0.5):
        text.append(f"In the valley lie the villages {joined(homes)}, and many more.")
    return " ".join(text)
