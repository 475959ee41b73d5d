"""The command line: a verb, a recipe's name or file, and the recipe's fields as flags.

tyro makes the flags from dataclasses (options.py, or the file of the verb's stage). A user error is printed as one
line, without a traceback. The exit codes are those of `train/guard.py`.
"""

from __future__ import annotations

import codecs
import io
import os.path
import signal
import sys
import unicodedata

from quern.cli.interrupt import EXIT_INTERRUPTED, EXIT_UNREAD, INTERRUPTED, discard_unread, exit_on_interrupt

with exit_on_interrupt():  # importing PyTorch takes seconds
    from quern import machine as machines
    from quern.cli.options import log
    from quern.cli.summaries import usage
    from quern.cli.verbs import VERBS
    from quern.runs.trust import read_flag
    from quern.waits.signals import prompt_signals


def main(arguments: list[str] | None = None) -> int:
    """The console script. Returns the exit code."""
    try:
        try:
            with prompt_signals({signal.SIGINT: KeyboardInterrupt}):
                return run_verb(sys.argv[1:] if arguments is None else arguments)
        except KeyboardInterrupt:
            print(INTERRUPTED, file=sys.stderr)
            return EXIT_INTERRUPTED
        finally:  # at the latest here, and not while Python shuts down, the error of a closed pipe is raised
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as in `quern --help | head -1`
        if not discard_unread():
            raise
        return EXIT_UNREAD


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Writes what a stream cannot encode: letters of names as \\u043d, so that names stay apart, signs as "?"."""
    assert isinstance(error, UnicodeEncodeError)
    lost = error.object[error.start : error.end]
    named = (one.isalnum() or unicodedata.category(one) == "Cs" for one in lost)  # Cs: bytes that are no UTF-8
    return "".join(
        one.encode("ascii", "backslashreplace").decode() if name else "?" for one, name in zip(lost, named, strict=True)
    ), error.end


codecs.register_error("quern", _in_ascii)


def run_verb(arguments: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="quern")
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        log(usage())
        return 0
    verb, rest = arguments[0], [_expanded(argument) for argument in arguments[1:]]
    if verb not in VERBS:
        print(f"quern: there is no '{verb}': use one of {', '.join(VERBS)}", file=sys.stderr)
        return 2
    try:
        return VERBS[verb](verb, read_flag(rest, log)) or 0
    except (ValueError, OSError, RuntimeError, ImportError, MemoryError) as error:
        if isinstance(error, BrokenPipeError) and discard_unread():
            return EXIT_UNREAD
        if machines.environment().get("QUERN_TRACEBACK"):
            raise
        from quern.runs.run_dir import plainly

        print(f"quern {verb}: {' '.join(plainly(error).split())}", file=sys.stderr)
        return 1


def _expanded(argument: str) -> str:
    """Expands ~/ after a flag's "=", which shells leave as it is."""
    name, equals, value = argument.partition("=")
    home = argument.startswith("--") and value.startswith("~/")
    return f"{name}={os.path.expanduser(value)}" if home else argument


if __name__ == "__main__":
    sys.exit(main())
