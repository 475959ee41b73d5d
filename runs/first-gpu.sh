#!/usr/bin/env bash
# The first figures of a GPU, in parts. Each part has a time limit and writes its records at once; a part that fails or
# runs out of time is told, and the next one begins.
#
#   runs/first-gpu.sh FOLDER_OF_TEXT [PART …]     the text: 64 MB or more, to be read once
#   TOY=1 runs/first-gpu.sh FOLDER_OF_TEXT        every part at toy size, on any machine
#
#   exact    each kernel against its plain twin, bf16 and fp16, odd lengths, windows, documents   5 minutes
#   bench    training with a profile, attention, decoding, cross-entropy, RoPE, Muon, FP8,
#            a minute of training on the text; each with a limit of its own                     15 minutes
#   ladder   the baseline on the third and the fourth rung                                        10 minutes
#   ideas    ten ideas (IDEAS="swiglu …") on the same rungs, as far as they come                  10 minutes
#   jax      tokens/s of the JAX twin beside torch's                                              3 minutes
#   serve    a server under load                                                                  3 minutes
#
# OUT is the folder of the records, by default out/first-gpu; SCALE multiplies every limit (0.5: half the time).
set -uo pipefail

if [ $# -lt 1 ]; then
    sed -n '2,17s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
data=$1
shift
all="exact bench ladder ideas jax serve"
parts=${*:-$all}
for name in $parts; do
    [[ " $all " == *" $name "* ]] || { echo "$0: there is no part $name: use $all" >&2; exit 2; }
done
. "$(dirname "$0")/find-quern.sh"
project=$(cd "$(dirname "$0")/.." && pwd)
out=${OUT:-out/first-gpu}
ideas=${IDEAS:-bigram trigram wide_mlp value_embeddings_all swiglu no_smear head_rate_032 plain_muon tied_head no_backout}
files=()
for idea in baseline $ideas; do files+=("$project/experiments/$idea.py"); done
lab=(--study gpu --data "$data" --out "$out" --most-pairs 3 --any-delta)
ladder=(lab ladder "${files[0]}" "${lab[@]}" --rungs 2 3)
compare=(lab compare "${files[@]}" "${lab[@]}" --ladder --rungs 2 3 --every)
quick=()
if [ -n "${TOY:-}" ]; then
    quick=(--quick)
    toy=(--depth 1 --model.width 32 --model.head-dim 16 --model.context 32 --text.vocab-size 300 --train.steps 4
        --train.batch-tokens 64 --text.tokenizer-megabytes 0.1 --text.val-megabytes 0.01)
    ladder=(lab compare "${files[@]:0:2}" "${lab[@]}" "${toy[@]}")
    compare=(lab compare "${files[@]}" "${lab[@]}" "${toy[@]}")
fi

mkdir -p "$out"
failed=0

# part NAME[-OF_IT] SECONDS COMMAND…
part() {
    local name=$1 seconds began=$SECONDS code
    seconds=$(awk "BEGIN { print int($2 * ${SCALE:-1}) }")
    shift 2
    [[ " $parts " == *" ${name%%-*} "* ]] || return 0
    echo "== $name, at most $seconds s"
    timeout --signal=INT --kill-after=20 "$seconds" "$@" 2>&1 | tee "$out/$name.log"
    code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || failed=1
    printf '{"part": "%s", "exit": %d, "seconds": %d}\n' "$name" "$code" $((SECONDS - began)) >> "$out/parts.jsonl"
    echo "== $name: exit code $code after $((SECONDS - began)) s"
}

part exact 300 "${quern[@]}" bench exactness --out "$out" "${quick[@]}"
part bench-train 210 "${quern[@]}" bench train --no-start --out "$out" "${quick[@]}"
part bench-attention 150 "${quern[@]}" bench attention --out "$out" "${quick[@]}"
part bench-decode 120 "${quern[@]}" bench decode --out "$out" "${quick[@]}"
part bench-loss 70 "${quern[@]}" bench cross-entropy --out "$out" "${quick[@]}"
part bench-kernels 70 "${quern[@]}" bench rope muon --out "$out" "${quick[@]}"
part bench-fp8 150 "${quern[@]}" bench fp8 --out "$out" "${quick[@]}"
part bench-quality 150 "${quern[@]}" bench quality --data "$data" --depth 12 --minutes 1 --out "$out" "${quick[@]}"
part ladder 600 "${quern[@]}" "${ladder[@]}"
part ideas 600 "${quern[@]}" "${compare[@]}"
part jax 180 "${quern[@]}" bench grug --out "$out" "${quick[@]}"
part serve 180 "${quern[@]}" bench serve --out "$out" "${quick[@]}"
exit "$failed"
