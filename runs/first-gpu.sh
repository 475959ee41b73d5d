#!/usr/bin/env bash
# The first figures of a GPU, in parts. Each part has a time limit and writes its records as it goes; a part that fails
# or runs out of time is told, and the next one begins. First, in some seconds, one line names what the machine lacks.
#
#   runs/first-gpu.sh FOLDER_OF_TEXT [PART …]     the text: 64 MB or more, which bench-quality, ladder and ideas read
#   TOY=1 runs/first-gpu.sh FOLDER_OF_TEXT        every part at toy size, on any machine
#
#   bench    its pieces, which can be asked for alone: bench-train, with a profile (at most 320 s), bench-attention
#            (240), bench-decode (290), bench-kernels: cross-entropy, RoPE, Muon (160), bench-fp8 (210),
#            bench-quality: half a minute of training on the text (270)
#   exact    each kernel against its plain twin, bf16 and fp16, odd lengths, windows, documents (270)
#   laws     resumed = uninterrupted, decoded = read at once, JAX's attention = its reference (420)
#   jax      tokens/s of the JAX twin beside torch's (300)
#   ladder   the baseline on the third and the fourth rung (540)
#   ideas    ten ideas (IDEAS="swiglu …") on the same rungs, WORKERS (6) processes at once, as far as they come (540)
#   serve    a server under load (280)
#
# Where a call ends after 600 s, and a machine after 1,800 s with its start and all copying, the first machine's calls
# follow one another at once, and the other parts wait for another machine:
#   LIMIT=570 … bench-train bench-attention     LIMIT=570 … exact bench-decode     LIMIT=480 … laws jax bench-kernels
#   LIMIT=570 … bench-fp8 bench-quality         LIMIT=570 … serve                  … ladder          … ideas
#
# RECORDS is the folder of the records, by default out/first-gpu (toy: out/first-gpu-toy), with compiled code and
# prepared text for the next call. OUT is a folder for first-gpu.tar.gz, the records alone, which each part writes anew.
# LIMIT is the seconds of all parts together; SCALE multiplies the limit of each (0.5: half the time).
set -uo pipefail

if [ $# -lt 1 ]; then
    sed -n '2,28s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
data=$1
shift
all="bench exact laws jax ladder ideas serve"
pieces="bench-train bench-attention bench-decode bench-kernels bench-fp8 bench-quality"
parts=${*:-$all}
for name in $parts; do
    [[ " $all $pieces " == *" $name "* ]] || { echo "$0: there is no part $name: use $all $pieces" >&2; exit 2; }
done
. "$(dirname "$0")/find-quern.sh"
python=${quern[0]}
[ ${#quern[@]} -gt 1 ] || python=$(dirname "$(command -v "$python")")/python
[ -x "$(command -v "$python")" ] || python=python3
project=$(cd "$(dirname "$0")/.." && pwd)

"$python" - "$project/pyproject.toml" "$parts" "${TOY:-}" << 'END' || exit 1
import importlib, importlib.metadata, os, re, shutil, sys, sysconfig, tomllib
from pathlib import Path

project, parts, toy = tomllib.loads(Path(sys.argv[1]).read_text("utf-8"))["project"], sys.argv[2].split(), sys.argv[3]
extras = sorted({extra for part, extra in (("serve", "serve"), ("jax", "jax"), ("laws", "jax")) if part in parts})
wanted = sum((project["optional-dependencies"][extra] for extra in extras), project["dependencies"])
installed = {str(one.name).lower().replace("_", "-") for one in importlib.metadata.distributions()}
lacks = sorted({re.match(r"[\w-]+", one)[0] for one in wanted} - installed)
if not lacks:
    for module in ("command", *extras):  # raises an error if packages of these packages are missing
        importlib.import_module(f"quern.bench.{module}")
    torch, header = sys.modules["torch"], Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    found = {
        "a torch whose tensors have grad_dtype": hasattr(torch.Tensor, "grad_dtype"),
        "a GPU that torch can use": toy or torch.cuda.is_available(),
        "a C compiler": toy or shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang"),
        "Python.h": toy or header.exists(),
    }
    lacks = [what for what, there in found.items() if not there]
sys.exit(f"first-gpu.sh: this machine lacks {', '.join(lacks)}: see docs/benchmarks/gpu.md" if lacks else 0)
END

records=${RECORDS:-out/first-gpu${TOY:+-toy}}
mkdir -p "$records" ${OUT:+"$OUT"}
records=$(cd "$records" && pwd)
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$records/caches/triton} PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$records/caches/inductor}
workers=${WORKERS:-6} platforms=(env)
ideas=${IDEAS:-bigram trigram wide_mlp value_embeddings_all swiglu no_smear head_rate_032 plain_muon tied_head no_backout}
files=()
for idea in baseline $ideas; do files+=("$project/experiments/$idea.py"); done
flags=(--out "$records")
[ -n "${TOY:-}" ] || flags+=(--device cuda)
lab=(--study gpu --data "$data" "${flags[@]}" --most-pairs 3 --any-delta)
law=("${quern[@]}" pretrain gpt --data tinyworld --depth 2 --text.tinyworld-megabytes 1 --text.vocab-size 1024
    --text.val-megabytes 0.05 --model.context 256 --train.batch-tokens 4096 --train.steps 20 --train.save-every 10
    --no-compile "${flags[@]}")
ladder=(lab ladder "${files[0]}" "${lab[@]}" --rungs 2 3)
compare=(lab compare "${files[@]}" "${lab[@]}" --ladder --rungs 2 3 --every)
exact=(bfloat16-128 bfloat16-64 float16-128 bfloat16-256 bfloat16-32)
if [ -n "${TOY:-}" ]; then
    flags+=(--quick) exact=(bfloat16-128) workers=2
    toy=(--depth 1 --model.width 32 --model.head-dim 16 --model.context 32 --text.vocab-size 300 --train.steps 4
        --train.batch-tokens 64 --text.tokenizer-megabytes 0.1 --text.val-megabytes 0.01)
    ladder=(lab compare "${files[@]:0:2}" "${lab[@]}" "${toy[@]}")
    compare=(lab compare "${files[@]}" "${lab[@]}" "${toy[@]}")
else
    platforms+=(JAX_PLATFORMS=cuda,cpu)
fi
failed=0

# part NAME[-OF_IT] SECONDS COMMAND…
part() {
    local name=$1 seconds began=$SECONDS code left=$((${LIMIT:-86400} - SECONDS))
    seconds=$(awk "BEGIN { s = $2 * ${SCALE:-1}; print int((s < $left ? s : $left) + 0.99) }")
    shift 2
    [[ " $parts " == *" $name "* || " $parts " == *" ${name%%-*} "* ]] || return 0
    [ "$left" -gt 0 ] || { echo "== $name: no time is left"; failed=1; return 0; }
    echo "== $name, at most $seconds s"
    timeout --signal=INT --kill-after=10 "$seconds" "$@" 2>&1 | tee "$records/$name.log"
    code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || failed=1
    printf '{"part": "%s", "exit": %d, "seconds": %d}\n' "$name" "$code" $((SECONDS - began)) >> "$records/parts.jsonl"
    echo "== $name: exit code $code after $((SECONDS - began)) s"
    [ -z "${OUT:-}" ] || find "$records" -name caches -prune -o -type f \( -name '*.json*' -o -name '*.log' \) \
        -size -4000k -printf '%P\0' | tar -C "$records" --null -czf "$OUT/first-gpu.tar.gz" -T -
}

bench=("${quern[@]}" bench)
part bench-train 320 "${bench[@]}" train --no-start --rounds 3 "${flags[@]}"
part bench-attention 240 "${bench[@]}" attention "${flags[@]}"
# Each dtype and head dim in a process: most of the time is that of compilers. It comes after bench-attention, because
# the tiles that kernels choose are kept, and processes that share the GPU choose worse.
part exact 270 xargs -P 5 -I{} "${bench[@]}" exactness --only {} --out "$records/exact/{}" "${flags[@]:2}" \
    < <(printf '%s\n' "${exact[@]}")
part bench-decode 290 "${bench[@]}" decode --rounds 3 "${flags[@]}"

# The second run begins with half of the first one. Eager: compiled code may add up gradients in any order.
resumed='set -e; rm -rf "$0"/law*; "$@" --run law; cp -r "$0"/law "$0"/law-resumed
    rm -r "$0"/law-resumed/pretrain/checkpoints/step-*20; "$@" --run law-resumed --resume
    diff -r -x manifest.json "$0"/law*/pretrain/checkpoints/step-*20 && echo "resumed = uninterrupted: every bit"'
part laws-resume 130 bash -c "$resumed" "$records/runs" "${law[@]}"
part laws-decode 140 "$python" - "${TOY:-}" << 'END'
import sys

from quern.bench.generate import talking_engine
from quern.bench.material import reference
from quern.kernels.attention.autotune import select_attention
from quern.machine import detect

toy = bool(sys.argv[1])
machine = select_attention(detect(None if toy else "cuda", "fp32"))
engine = talking_engine(reference(toy, 0, device=machine.device.type), machine)
engine.model.head.weight.data.div_(engine.model.head.weight.size(1) ** 0.5)  # logits that the cap hardly bends
engine.warm_up([4])
prompts, worst = [[engine.tokenizer.bos, *range(n)] for n in (0, 1, 17, engine.context // 4)], 0.0
for prompt, [reply] in zip(prompts, engine.generate(prompts, max_tokens=engine.context // 4, logprobs=0)):
    pieces = engine.read([*prompt, *reply.ids], part=engine.context)
    whole = [token.logprob for piece in pieces for token in piece][len(prompt) - 1 :]
    worst = max(worst, *(abs(a - b) for a, b in zip(whole, reply.logprobs, strict=True)))
print(f"decoded = read at once: log-probabilities differ by {worst:.2g}, and may by 1e-3")
sys.exit(not worst <= 1e-3)
END
part laws-jax 150 "${platforms[@]}" "${quern[@]}" grug gauntlet gpt --steps 3 --out "$records"

part jax 300 "${bench[@]}" grug --rounds 3 "${flags[@]}"
part bench-kernels 160 "${bench[@]}" cross-entropy rope muon "${flags[@]}"
part bench-fp8 210 "${bench[@]}" fp8 --rounds 3 "${flags[@]}"
part bench-quality 270 "${bench[@]}" quality --data "$data" --depth 12 --minutes 0.4 "${flags[@]}"
# Small models leave most of a GPU idle: several processes work on one study. A process trains a rung of the ladder.
part ladder 540 xargs -P 2 -I{} "${quern[@]}" "${ladder[@]}" < <(seq 2)
part ideas 540 xargs -P "$workers" -I{} "${quern[@]}" "${compare[@]}" < <(seq "$workers")
part serve 280 "${bench[@]}" serve --rounds 2 "${flags[@]}"
exit "$failed"
