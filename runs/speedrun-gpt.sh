#!/usr/bin/env bash
# From web text to a chat model on one machine, in the order of nanochat's speedrun: tokenizer and token shards, base
# model, CORE, fine-tuning, chat tasks, report. Started again, it continues: what is finished is not repeated.
#
#   DEPTH=24 GPUS=8 runs/speedrun-gpt.sh [more flags of `quern pretrain gpt`, such as --train.fp8 head]
#
# Other variables: RUN, the run's name; OUT, the folder of all files; DATA, a public set or your own text; CONVERSATIONS, as
# in docs/fine-tuning.md (add your own with repeats, to tell the model who it is); CHAT_DATA, the folder with the files of
# the chat tasks. The downloads hold those of ARC, MMLU and GSM8K; HumanEval is asked if its file is there. More flags,
# separated by spaces: TEXT of `quern prepare`, SFT of `quern sft`, CORE and CHAT of `quern evaluate`, MACHINE of all ranks.
set -euo pipefail

DEPTH=${DEPTH:-24} GPUS=${GPUS:-8} OUT=${OUT:-out}
run=(--run "${RUN:-speedrun-gpt}" --out "$OUT")
read -ra text <<< "--depth $DEPTH ${TEXT:-}"
read -ra ranks <<< "--ranks $GPUS ${MACHINE:-}"
read -ra conversations <<< "${CONVERSATIONS:-smol-smoltalk mmlu gsm8k,repeats=4 spelling}"
read -ra core <<< "${CORE:-}"
read -ra sft <<< "${SFT:-}"
read -ra chat <<< "${CHAT:-}"

quern prepare gpt --data "${DATA:-climbmix}" "${text[@]}" --out "$OUT"
quern pretrain gpt --data "${DATA:-climbmix}" "${text[@]}" "${run[@]}" "${ranks[@]}" --resume "$@"
quern evaluate --stage pretrain --tasks core "${run[@]}" "${ranks[@]}" "${core[@]}"
quern sft --conversations "${conversations[@]}" "${run[@]}" "${ranks[@]}" --resume "${sft[@]}"
quern evaluate --stage sft --tasks chat --chat-data "${CHAT_DATA:-$OUT/downloads}" "${run[@]}" "${ranks[@]}" "${chat[@]}"
quern report "${run[@]}"
