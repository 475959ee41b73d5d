"""`quern completion SHELL`: a script with which the Tab key completes verbs, flags and the names of runs."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence

from quern.cli.lab import TOOLS
from quern.cli.summaries import SUMMARIES
from quern.flags.check_flags import HELP, HELP_FLAGS
from quern.runs.manage import TAKES
from quern.stages.jax.command import VERBS as TWIN

# Both say where the cursor is as "POSITION VERB SECOND-WORD WORD", and look for the first pattern that fits. compgen -W
# executes a name such as $(…), so that only names of runs may reach it.
BASH = """_quern() {
  local word="${COMP_WORDS[COMP_CWORD]}" choices
  choices="$(command ls out/runs 2>/dev/null | command grep -xE '[A-Za-z0-9._-]+')"
  case "$COMP_CWORD ${COMP_WORDS[1]} ${COMP_WORDS[2]} $word" in
CASES
  esac
  COMPREPLY=($(compgen -W "$choices" -- "$word"))
}
complete -o default -F _quern quern"""
FISH = """function _quern
  set -l line (commandline -opc)
  switch (count $line)" $line[2] $line[3] "(commandline -ct)
CASES
    case '*'; command ls out/runs 2>/dev/null
  end
end
complete -c quern -a '(_quern)'"""
CASE = '    {}) choices="{}";;'
SHELLS = {
    "bash": (BASH, CASE, "~/.local/share/bash-completion/completions/quern"),
    "zsh": (f"autoload -Uz bashcompinit && bashcompinit\n{BASH}", CASE, "a file that ~/.zshrc sources"),
    "fish": (FISH, "    case '{}'; string split -- ' ' '{}'", "~/.config/fish/completions/quern.fish"),
}


def script(words: Sequence[str], run_verb: Callable[[list[str]], int]) -> str:
    """The script for a shell, or the help. run_verb: runs a command line. Raises ValueError where no shell is named."""
    files = [f"quern completion {name}, whose output goes into {file}" for name, (*_, file) in SHELLS.items()]
    if words and words[0] in HELP:
        return "\n".join(["usage:", *(f"  {line}" for line in files)])
    if len(words) != 1 or words[0] not in SHELLS:
        raise ValueError(f"name your shell: {'; '.join(files)}")
    shell, case, _ = SHELLS[words[0]]
    tools = {"lab": TOOLS, "grug": TWIN}
    choices = {"1 *": SUMMARIES, **{f"2 {verb} *": names for verb, names in (tools | {"runs": TAKES}).items()}}
    for verb in SUMMARIES:
        for name in tools.get(verb, ()):
            choices[f"* {verb} {name} -*"] = flags([verb, name], run_verb)
        if verb not in (*tools, "completion"):
            choices[f"* {verb} * -*"] = flags([verb], run_verb)
    cases = []
    for at, of in choices.items():
        quoted = '"{}"'.format(at.replace("*", '"*"')).replace('""', "")
        cases.append(case.format(at if shell is FISH else quoted, " ".join(of)))
    return shell.replace("CASES", "\n".join(cases))


def flags(verb: list[str], run_verb: Callable[[list[str]], int]) -> list[str]:
    """The flags of a verb."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        run_verb([*verb, HELP_FLAGS])
    return printed.getvalue().split()
