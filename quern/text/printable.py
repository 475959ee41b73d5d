"""Makes the output of a model safe to show in a terminal, in Markdown and in HTML, and its numbers plain to read."""

from __future__ import annotations

import re

_SIGNS = str.maketrans({"×": "*", "÷": "/", "·": "*"} | dict.fromkeys("\u2212\u2013\u2010\u2011\ufe63\uff0d", "-"))
# C0 and C1 controls except tab and line feed, DEL, bidirectional overrides, lone surrogates.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def ascii_signs(text: str) -> str:
    """The text with typographic signs of arithmetic, such as U+2212 for minus, as the characters of a keyboard."""
    return text.translate(_SIGNS)


def printable(text: str) -> str:
    """The text with U+FFFD for every character that controls a terminal or cannot be encoded."""
    return CONTROL.sub("\ufffd", text)
