#!/usr/bin/env bash
# From web text to a chat model on one machine, as nanochat's speedrun: tokenizer and token shards, base model,
# fine-tuning, CORE, chat tasks, report. Started again, it continues: what is finished is not repeated. Whatever a later
# command would refuse is refused before the first step.
#
#   DEPTH=24 GPUS=8 runs/speedrun-gpt.sh [more flags of `quern run gpt`, such as --train.fp8 head]
#
# Other variables: RUN, the run's name; OUT, the folder of all files; DATA, a public set or your own text; CONVERSATIONS, as
# in docs/fine-tuning.md (add your own with repeats, to tell the model who it is); CHAT_DATA, a folder with the files of the
# chat tasks, which are downloaded otherwise. More flags, separated by spaces: TEXT of `quern prepare`, CORE and CHAT of
# `quern evaluate`, MACHINE of all ranks.
set -euo pipefail

DEPTH=${DEPTH:-24} GPUS=${GPUS:-8} OUT=${OUT:-out}
run=(--run "${RUN:-speedrun-gpt}" --out "$OUT")
read -ra text <<< "--depth $DEPTH ${TEXT:-}"
read -ra ranks <<< "--ranks $GPUS ${MACHINE:-}"
read -ra conversations <<< "${CONVERSATIONS:-smol-smoltalk mmlu gsm8k,repeats=4 spelling}"
read -ra core <<< "${CORE:-}"
read -ra chat <<< "${CHAT:-}"

. "$(dirname "$0")/find-quern.sh"
ask_core=(evaluate --stage pretrain --tasks core "${run[@]}" "${ranks[@]}" "${core[@]}")
ask_chat=(evaluate --stage sft --tasks chat ${CHAT_DATA:+--chat-data "$CHAT_DATA"} "${run[@]}" "${ranks[@]}" "${chat[@]}")

"${quern[@]}" "${ask_core[@]}" --check
"${quern[@]}" "${ask_chat[@]}" --check
"${quern[@]}" prepare gpt --data "${DATA:-climbmix}" "${text[@]}" --out "$OUT"
"${quern[@]}" run gpt --data "${DATA:-climbmix}" "${text[@]}" --conversations "${conversations[@]}" "${run[@]}" \
    "${ranks[@]}" "$@"
"${quern[@]}" "${ask_core[@]}"
"${quern[@]}" "${ask_chat[@]}"
"${quern[@]}" report "${run[@]}"
