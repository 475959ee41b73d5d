"""The child process in which `grammar.Grammars` compiles JSON schemas on trial (`python -m quern.generate.trial`).

Some schemas need hours and all memory: {"multipleOf": 99999989}, thirty patterns in `allOf`. llguidance has no limit
for that, and nothing can stop it within a process. So the system ends the child, and the next schema starts another.
"""

import resource
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from quern.process import serve

SECONDS = 2
"""Processor time for one grammar, and up to a second more, because the system counts whole seconds."""


def compile_all(order: Any, grammars: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Answers after each grammar that compiles in time. The caller reports the errors of a grammar, not the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, whose end closes the standard input
    tokenizer, most = LLTokenizer("byte"), resource.getrlimit(resource.RLIMIT_CPU)[1]
    for grammar in grammars:
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + SECONDS, most))
        with suppress(Exception):
            LLMatcher(tokenizer, grammar, log_level=0)
        yield {}


if __name__ == "__main__":
    serve(compile_all)
