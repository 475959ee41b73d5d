"""The loop of `quern chat`: reads an entry, runs a command or asks the model, and reports errors."""

from __future__ import annotations

from quern.chat.commands import greeting, run_command
from quern.chat.conversation import Conversation
from quern.chat.lines import Entry, Read, next_entry
from quern.text.printable import printable


def talk(conversation: Conversation, read: Read, interactive: bool) -> None:
    """Handles entries until an empty line, the end of input or Ctrl-C; during a reply, Ctrl-C ends only the reply.

    Args:
        conversation: Where it begins.
        read: Returns the next line.
        interactive: There is a terminal: print a greeting, and end the last prompt's line.
    """
    put = conversation.put
    if interactive:
        put(greeting(conversation))
    while True:
        try:
            entry = next_entry(read)
        except (EOFError, KeyboardInterrupt):
            if interactive:
                put("\n")
            return
        if not entry.text.strip() and not entry.quoted:
            return
        try:
            _handle(conversation, entry)
        except (ValueError, OSError) as error:
            put(f"({printable(_reason(error))})\n")


def _handle(conversation: Conversation, entry: Entry) -> None:
    if not entry.quoted and entry.text.lstrip().startswith("/"):
        run_command(conversation, entry.text.strip())
    elif entry.text.strip():
        conversation.enter(entry.text)


def _reason(error: Exception) -> str:
    """An error's message; for one of the operating system, the file and the reason."""
    if isinstance(error, OSError) and error.strerror is not None and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
