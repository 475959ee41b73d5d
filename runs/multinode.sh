#!/usr/bin/env bash
# Pretrains on several machines that share a file system: the same line on each of them, within 15 minutes.
#
#   MEET=host:29500 NODES=2 GPUS=8 runs/multinode.sh gpt --depth 20 --run big [more flags of `quern pretrain`]
#
# MEET: one of the machines and a free port there. GPUS: ranks on each machine. When a rank or a machine is lost, all
# start again from the newest good checkpoint, up to RESTARTS times. SIGTERM or SIGHUP to this process on any one machine
# makes all machines stop after the same step and save. Exit codes are those of `quern pretrain`.
set -euo pipefail

if [ $# -lt 1 ] || [ -z "${MEET:-}" ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
exec quern pretrain "$@" --resume --nodes "${NODES:-2}" --ranks "${GPUS:-8}" --restarts "${RESTARTS:-3}" \
    --rendezvous "$MEET"
