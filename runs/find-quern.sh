# Sourced by the scripts of this folder. Sets the array `quern` to the command: that of the .venv beside this folder, else
# of PATH, else of the `python` or the `python3` in PATH. So a script runs without an active environment.
beside=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/quern
if [ -x "$beside" ]; then
    quern=("$beside")
elif command -v quern > /dev/null; then
    quern=(quern)
elif python -c 'import quern.cli' 2> /dev/null; then
    quern=(python -m quern)
elif python3 -c 'import quern.cli' 2> /dev/null; then
    quern=(python3 -m quern)
else
    echo "$0: quern is not installed: run \`make setup\` in ${beside%/.venv/bin/quern}, or activate its environment" >&2
    exit 1
fi
