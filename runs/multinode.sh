#!/usr/bin/env bash
# Pretrain on several machines that share a file system: run the same line on each machine, within 15 minutes.
#
#   MEET=host:29500 NODES=2 GPUS=8 runs/multinode.sh gpt --depth 20 --run big [more flags of `quern pretrain`]
#
# MEET: one of the machines and a free port on it. GPUS: ranks on each machine. If a rank or a machine is lost, all ranks
# restart from the newest good checkpoint, up to RESTARTS times. SIGTERM or SIGHUP to this process on any one machine
# stops all machines after the same step; they save. The exit codes are those of `quern pretrain`.
set -euo pipefail

if [ $# -lt 1 ] || [ -z "${MEET:-}" ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
. "$(dirname "$0")/find-quern.sh"
exec "${quern[@]}" pretrain "$@" --resume --nodes "${NODES:-2}" --ranks "${GPUS:-8}" --restarts "${RESTARTS:-3}" \
    --rendezvous "$MEET"
