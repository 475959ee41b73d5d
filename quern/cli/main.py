"""The command line: a verb, a recipe's name or file, and the recipe's fields as flags.

The flags are the fields of dataclasses (options.py, or the file of the stage). A user error is printed as one
line, without a traceback. Ctrl-C during imports is one line too. The exit codes are those of `train/guard.py`; 1 for an
error; 2 for an unknown verb; 130 after Ctrl-C; 141 where nobody reads the output.
"""

from __future__ import annotations

import io
import os
import os.path
import select
import signal
import sys
import threading

from quern import __version__

# It also sets what PyTorch reads when it is imported.
from quern.process import UNAWAITED, environment, own_place, prompt_signals

INTERRUPTED = "interrupted"
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_UNREAD = 141  # 128 + SIGPIPE. The signal stays ignored, because the default action would also end servers.


def main(arguments: list[str] | None = None) -> int:
    """The console script. Returns the exit code."""
    code = run(arguments)
    if any(thread.name == UNAWAITED for thread in threading.enumerate()):
        os._exit(code)
    return code


def run(arguments: list[str] | None) -> int:
    """Runs a verb, and writes out the streams. Returns the exit code."""
    # A stream that was closed (`>&-`) is the null device: no file that is opened later gets its number.
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        try:
            with prompt_signals({signal.SIGINT: interrupted}):
                return run_verb(sys.argv[1:] if arguments is None else arguments)
        except KeyboardInterrupt:
            print(INTERRUPTED, file=sys.stderr)
            return EXIT_INTERRUPTED
        finally:  # at the latest here, and not while Python shuts down, the error of a closed pipe is raised
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
    except OSError as error:  # of a stream, such as that of a full disk
        return _told(error, "quern")


def interrupted(number: int) -> KeyboardInterrupt:
    """Returns the exception for SIGINT. During an import it ends the process: some libraries lose exceptions."""
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame := frame.f_back:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, f"{INTERRUPTED}\n".encode())
            os._exit(EXIT_INTERRUPTED)
    return KeyboardInterrupt()


def discard_unread() -> bool:
    """Redirects each of stdout and stderr whose reader closed the pipe to nowhere. Returns whether there was one."""
    poll = select.poll()
    for file in (1, 2):
        poll.register(file, 0)
    unread = [file for file, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for file in unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file)
    return bool(unread)


def run_verb(arguments: list[str]) -> int:
    """Runs a verb and returns its exit code. Each branch imports only what it needs: PyTorch takes seconds."""
    from quern.cli.summaries import SUMMARIES, following, usage
    from quern.temporaries import NAMES

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=NAMES)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), flush=True)
        return 0
    if arguments[0] == "--version":
        print(f"quern {__version__}", flush=True)
        return 0
    verb, words = arguments[0], [_expanded(argument) for argument in arguments[1:]]
    if verb not in SUMMARIES:
        from quern.validate import nearest

        print(f"quern: there is no '{verb}'{nearest(verb, SUMMARIES)}; all of them: quern --help", file=sys.stderr)
        return 2
    try:
        from quern.cli.verbs import VERBS, log, with_run
        from quern.flags.recipe_flags import Arguments
        from quern.runs.run_dir import FLAG, trust_runs

        if verb == "completion":
            from quern.cli.completion import script

            print(script(words, run_verb), flush=True)
            return 0
        rest = with_run(verb, Arguments(word for word in words if word != FLAG))
        if FLAG in words:
            trust_runs(rest, log)
        code = VERBS[verb](verb, rest) or 0
        if code == 0 and "WORLD_SIZE" not in environment() and (then := following(verb, rest)):
            log(then)
        return code
    except (ValueError, OSError, RuntimeError, ImportError, MemoryError) as error:
        return _told(error, f"quern {verb}")


def _told(error: Exception, command: str) -> int:
    """Prints an error as one line, and returns the exit code."""
    if isinstance(error, BrokenPipeError) and discard_unread():  # the reader has gone, as in `quern --help | head -1`
        return EXIT_UNREAD
    from quern.temporaries import plainly

    if environment().get("QUERN_TRACEBACK"):
        raise error
    print(f"{command}: {own_place(error)}{' '.join(plainly(error).split())}", file=sys.stderr)
    return 1


def _expanded(argument: str) -> str:
    """Expands ~/ after a flag's "=", which shells leave as it is."""
    name, equals, value = argument.partition("=")
    home = argument.startswith("--") and value.startswith("~/")
    return f"{name}={os.path.expanduser(value)}" if home else argument


if __name__ == "__main__":
    sys.exit(main())
