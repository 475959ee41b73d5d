"""An evaluation task in one file: capital cities, in the model's own words and as multiple choice.

Run it with `quern evaluate --tasks experiments/task_capitals.py`.
"""

from quern.eval.task import Item, Task, question

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Canada": "Ottawa",
    "Peru": "Lima",
}


def items(seed: int, count: int) -> list[Item]:
    """The countries are the same for every seed."""
    cities = list(CAPITALS.values())
    named, chosen = [], []
    for index, (country, city) in enumerate(list(CAPITALS.items())[:count]):
        options = tuple(sorted(cities[(index + step) % len(cities)] for step in range(4)))
        text = f"What is the capital of {country}?"
        named.append(question(text, city, kind="named"))
        chosen.append(question(f"{text} {', '.join(options[:-1])} or {options[-1]}?", city, options, kind="chosen"))
    return named + chosen


TASK = Task("capitals", items)
