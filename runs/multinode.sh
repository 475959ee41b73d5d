#!/usr/bin/env bash
# Pretrains on several machines that share a file system: the same line on each of them, within 15 minutes.
#
#   MEET=host:29500 NODES=2 GPUS=8 runs/multinode.sh gpt --depth 20 --run big [more flags of `quern pretrain`]
#
# MEET: one of the machines and a free port there. GPUS: ranks on each machine. When a rank or a machine is lost, all
# start anew from the newest good checkpoint, up to RESTARTS times. SIGTERM to torchrun on any one machine makes all stop
# after the same step and save. Exit codes are those of `quern pretrain`.
set -euo pipefail

if [ $# -lt 1 ] || [ -z "${MEET:-}" ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
# How the ranks ended, where a restart would change nothing: torchrun takes every exit code but 0 for a failure.
QUERN_RESULT=$(mktemp -u)
export QUERN_RESULT OMP_NUM_THREADS=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
trap 'rm -f "$QUERN_RESULT"' EXIT

torchrun --nnodes="${NODES:-2}" --nproc-per-node="${GPUS:-8}" --max-restarts="${RESTARTS:-3}" \
    --rdzv-backend=c10d --rdzv-endpoint="$MEET" --rdzv-id="${RUN_ID:-quern}" \
    --module -- quern.cli pretrain "$@" --resume &
trap 'kill -TERM %1' TERM INT
code=0
wait %1 || code=$?
wait %1 2>/dev/null || true # the first wait ends when a signal comes, torchrun when the ranks have saved
if [ -f "$QUERN_RESULT" ]; then code=$(cat "$QUERN_RESULT"); fi
exit "$code"
