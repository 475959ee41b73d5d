"""What a model wrote, made safe to show: in a terminal, in Markdown, in HTML."""

from __future__ import annotations

import re

# C0 and C1 except tab and line feed, DEL, the overrides of the writing direction, lone surrogates.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with a replacement sign for every character that would steer a terminal or cannot be encoded."""
    return CONTROL.sub("\ufffd", text)
