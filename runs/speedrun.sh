#!/usr/bin/env bash
# modded-nanogpt's run of May 2025: 12 layers, 768 wide, 6 heads, 1,770 steps of 8 streams of 48k tokens of FineWeb.
# Its goal is a validation loss of 3.28 on the first 10,485,760 tokens of its validation file (val-megabytes counts four
# bytes per token). Our validation omits the <|endoftext|> targets and reads each document from its beginning.
#
#   runs/speedrun.sh fineweb-gpt2 --ranks 8 --train.fp8 head [more flags of `quern pretrain unet`]
#   runs/speedrun.sh fineweb10B r50k_base.tiktoken --ranks 8 …
#
# fineweb-gpt2 is downloaded, with GPT-2's vocabulary: 1.6 GB. fineweb10B: a folder of its .bin files
# (fineweb_train_*.bin, fineweb_val_*.bin); r50k_base.tiktoken: the vocabulary as tiktoken stores it. Each of
# eight GPUs reads one stream; with fewer ranks, each rank reads several in sequence.
set -euo pipefail

if [ $# -lt 1 ]; then
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
data=$1
shift
case ${1--} in
    -*) ;;
    *) set -- --text.tokenizer "$@" ;;
esac

. "$(dirname "$0")/find-quern.sh"
exec "${quern[@]}" pretrain unet --run speedrun \
    --data "$data" --text.val-megabytes 41.94304 \
    --depth 12 --model.width 768 --model.heads 6 --model.head-dim 128 --model.context 49152 \
    --train.steps 1770 --train.batch-tokens 393216 --train.micro-batch-tokens 49152 \
    --train.eval-every 125 --train.save-every 885 "$@"
