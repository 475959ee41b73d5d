"""The dictionary of the tinyworld (words.toml): vocabulary beyond the facts of the characters."""

from quern.text.tinyworld.data import lines, table, words

_TABLE = table("words")
WORDS, THINGS, ADJECTIVES, MOODS = (words(_TABLE[key]) for key in ("words", "things", "adjectives", "moods"))
DOINGS = lines(_TABLE["doings"])
OPPOSITES = tuple(tuple(pair.split("/")) for pair in words(_TABLE["opposites"]))
CATALOGUE: dict[str, tuple[str, ...]] = {category: words(block) for category, block in _TABLE["catalogue"].items()}
