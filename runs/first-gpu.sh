#!/usr/bin/env bash
# The first figures of a GPU, in parts. Each part has a time limit and writes its records as it goes; a part that fails
# or runs out of time is told, and the next one begins.
#
#   runs/first-gpu.sh FOLDER_OF_TEXT [PART …]     the text: 64 MB or more, to be read once
#   TOY=1 runs/first-gpu.sh FOLDER_OF_TEXT        every part at toy size, on any machine
#
#   bench    its pieces, which can be asked for alone: bench-train, with a profile (at most 240 s), bench-attention
#            (270), bench-decode (240), bench-kernels: cross-entropy, RoPE, Muon (160), bench-fp8 (210),
#            bench-quality: half a minute of training on the text (270)
#   exact    each kernel against its plain twin, bf16 and fp16, odd lengths, windows, documents (300)
#   ladder   the baseline on the third and the fourth rung (540)
#   ideas    ten ideas (IDEAS="swiglu …") on the same rungs, as far as they come (540)
#   jax      tokens/s of the JAX twin beside torch's (180)
#   serve    a server under load (240)
#
# Where a call ends after 600 s, and a machine after 1,800 s, the first machine's calls are
#   bench-train bench-attention      exact bench-decode      bench-kernels bench-fp8 jax
# (at most 510, 540 and 550 s), and a second machine's are
#   bench-quality serve              ladder                  ideas
#
# OUT is the folder of the records, by default out/first-gpu; SCALE multiplies every limit (0.5: half the time).
set -uo pipefail

if [ $# -lt 1 ]; then
    sed -n '2,25s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
data=$1
shift
all="bench exact ladder ideas jax serve"
pieces="bench-train bench-attention bench-decode bench-kernels bench-fp8 bench-quality"
parts=${*:-$all}
for name in $parts; do
    [[ " $all $pieces " == *" $name "* ]] || { echo "$0: there is no part $name: use $all $pieces" >&2; exit 2; }
done
. "$(dirname "$0")/find-quern.sh"
project=$(cd "$(dirname "$0")/.." && pwd)
out=${OUT:-out/first-gpu}
ideas=${IDEAS:-bigram trigram wide_mlp value_embeddings_all swiglu no_smear head_rate_032 plain_muon tied_head no_backout}
files=()
for idea in baseline $ideas; do files+=("$project/experiments/$idea.py"); done
lab=(--study gpu --data "$data" --out "$out" --most-pairs 3 --any-delta)
[ -n "${TOY:-}" ] || lab+=(--device cuda)
ladder=(lab ladder "${files[0]}" "${lab[@]}" --rungs 2 3)
compare=(lab compare "${files[@]}" "${lab[@]}" --ladder --rungs 2 3 --every)
flags=(--out "$out" --device cuda)  # without a GPU that works, refused
if [ -n "${TOY:-}" ]; then
    flags=(--out "$out" --quick)
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
    [[ " $parts " == *" $name "* || " $parts " == *" ${name%%-*} "* ]] || return 0
    echo "== $name, at most $seconds s"
    timeout --signal=INT --kill-after=10 "$seconds" "$@" 2>&1 | tee "$out/$name.log"
    code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || failed=1
    printf '{"part": "%s", "exit": %d, "seconds": %d}\n' "$name" "$code" $((SECONDS - began)) >> "$out/parts.jsonl"
    echo "== $name: exit code $code after $((SECONDS - began)) s"
}

bench=("${quern[@]}" bench)
part bench-train 240 "${bench[@]}" train --no-start --rounds 3 "${flags[@]}"
part bench-attention 270 "${bench[@]}" attention "${flags[@]}"
part exact 300 "${bench[@]}" exactness "${flags[@]}"
part bench-decode 240 "${bench[@]}" decode "${flags[@]}"
part bench-kernels 160 "${bench[@]}" cross-entropy rope muon "${flags[@]}"
part bench-fp8 210 "${bench[@]}" fp8 --rounds 3 "${flags[@]}"
part bench-quality 270 "${bench[@]}" quality --data "$data" --depth 12 --minutes 0.4 "${flags[@]}"
part ladder 540 "${quern[@]}" "${ladder[@]}"
part ideas 540 "${quern[@]}" "${compare[@]}"
part jax 180 "${bench[@]}" grug "${flags[@]}"
part serve 240 "${bench[@]}" serve --rounds 2 "${flags[@]}"
exit "$failed"
