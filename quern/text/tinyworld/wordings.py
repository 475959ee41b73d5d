"""How the tinyworld asks for a fact, answers and tells it (wordings.toml): the wordings of each relation.

Training text contains QUESTIONS only. HELD_OUT_QUESTIONS are for the evaluation.
"""

from collections.abc import Mapping

from quern.text.tinyworld.data import table, wordings

Wordings = Mapping[str, tuple[str, ...]]

QUESTIONS: Wordings = wordings("wordings")["questions"]
HELD_OUT_QUESTIONS: Wordings = wordings("wordings")["held_out_questions"]
ANSWERS: Wordings = wordings("wordings")["answers"]
STATEMENTS: Wordings = wordings("wordings")["statements"]
SELF_STATEMENTS: Wordings = wordings("wordings")["self_statements"]
DIRECT_QUESTIONS: Wordings = wordings("wordings")["direct_questions"]
TAILS: Wordings = wordings("wordings")["tails"]
FOLLOW_UPS: Wordings = wordings("wordings")["follow_ups"]
OPENINGS: list[str] = table("wordings")["openings"]
CLOSINGS: list[str] = table("wordings")["closings"]
