"""The drills of the tinyworld's conversations: true, in the letters of their lists, and silent on what is held out."""

import re
from collections import Counter

from quern.text.chat import Message, validate
from quern.text.tinyworld import skills
from quern.text.tinyworld.prose import Pen
from quern.text.tinyworld.skills import (
    CATEGORIES,
    HELD_OUT_WORDS,
    PRACTICE_WORDS,
    TRAIN_WORDS,
    is_asked_in_conversations,
)
from quern.text.tinyworld.world import CHARACTERS, RELATIONS, VALUES, WORDS

RELATION_OF = {value: relation for relation in RELATIONS for value in VALUES[relation]}
CATEGORY_QUESTION = re.compile(r"(?:Which of these|Which one|Which word here) is (.+)\?")


def exchanges(make, count: int) -> list[list[Message]]:
    found = [make(Pen(f"drill:{index}")) for index in range(count)]
    for messages in found:
        validate(messages)
    return found


def letter_and_option(line: str) -> tuple[str, str]:
    found = re.fullmatch(r"- (.+) ([A-E])", line)
    assert found, line
    return found[2], found[1]


def right(question: str, options: list[str]) -> list[str]:
    """The options that answer a question, from the facts and the categories alone."""
    category = CATEGORY_QUESTION.fullmatch(question)
    if category:
        return [option for option in options if option in CATEGORIES[category[1]][1]]
    names = [name for name in re.findall(r"[A-Z][a-z]+", question) if name in CHARACTERS]
    named = [option for option in options if re.search(rf"\b{option}\b", question)]
    if named and re.match(r"Which letter (has|stands)|Where is|Take|Choose|I choose", question):
        return named
    (name,) = names
    relation = RELATION_OF[options[0]]
    assert is_asked_in_conversations(name, relation)
    return [option for option in options if option == CHARACTERS[name].fact(relation)]


def test_every_question_about_a_list_has_one_right_option_and_the_reply_is_its_letter() -> None:
    letters: dict[int, Counter[str]] = {}
    several = 0
    for messages in exchanges(skills.options, 1500):
        first, *lines = str(messages[0]["content"]).split("\n")
        options = dict(map(letter_and_option, lines))
        assert "".join(options) == "ABCDE"[: len(options)] and len(set(options.values())) == len(options) >= 2
        if re.match("Which letters|Name the letters", first):
            said = list(map(letter_and_option, str(messages[1]["content"]).split("\n")))
            assert len(said) >= 2 and all(options[letter] == value and value in first for letter, value in said)
            several += 1
            continue
        asked = [first, *(str(message["content"]) for message in messages[2::2])]
        for question, reply in zip(asked, messages[1::2], strict=True):
            letter, option = letter_and_option(str(reply["content"]))
            assert options[letter] == option
            assert right(question, list(options.values())) == [option], (question, options)
            letters.setdefault(len(options), Counter())[letter] += 1
    assert several > 200 and sorted(letters) == [2, 3, 4, 5]
    for count, found in letters.items():  # no letter is a better guess than another
        assert max(found.values()) < 1.25 * sum(found.values()) / count


def test_no_drill_tells_a_letter_of_a_held_out_word() -> None:
    named = set()
    for make in (skills.about_letters, skills.dictionary):
        for messages in exchanges(make, 3000):
            question, reply = (str(message["content"]) for message in messages)
            words = [word for word in re.findall(r"[a-z]+", question) if word in WORDS and f"word {word} " in reply]
            assert words
            for word in words:
                if make is skills.dictionary:
                    named.add(word)
                    assert reply == f"The word {word} is in my dictionary."
                else:
                    assert word in TRAIN_WORDS and f"The word {word} is spelled {'-'.join(word)}." in reply
            if found := re.search(r"The (first|last) letter is (\w)\.", reply):
                assert found[2] == words[0][0 if found[1] == "first" else -1]
    assert {*HELD_OUT_WORDS, *PRACTICE_WORDS} <= named
