"""Writes a run's Llama as one GGUF file, which llama.cpp and programs that build on it read.

llama.cpp rotates neighbouring channels (2i, 2i + 1) where quern, like Hugging Face, rotates channel i with i + E/2. So
the rows of the query and key projections change places; all other weights keep their values and layouts. Source: the
GGUF specification and llama.cpp's loader (ggml-org/llama.cpp).

Matrices have the chosen dtype, norms are fp32. llama.cpp computes with the stored values, so only fp32 is exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quern.interop.llama_format import refuse_windows, weights_to
from quern.machine import detect
from quern.model.llama import NORM_EPS, Llama, mlp_width
from quern.recipe import ResolvedModel
from quern.runs.load import load
from quern.runs.run_dir import RunDir
from quern.temporaries import sync_path, whole_file
from quern.text.hugging_face import CHAT_TEMPLATE, merge_pairs, spell
from quern.text.tokenizer import GPT2_SPLIT_PATTERN, LLAMA3_SPLIT_PATTERN, Tokenizer, split_pattern
from quern.validate import extra

ROTATED = ("attn_q.weight", "attn_k.weight")

NEAREST = "qwen35"
"""llama.cpp's name of the split that a tokenizer with an unknown pattern gets."""
PRE_TOKENIZERS = {split_pattern(1): NEAREST, GPT2_SPLIT_PATTERN: "gpt-2", LLAMA3_SPLIT_PATTERN: "llama-bpe"}
"""Split patterns that llama.cpp has, and its names for them (tokenizer.ggml.pre)."""
NORMAL, CONTROL, UNUSED = 1, 3, 5
"""Kinds of tokens (tokenizer.ggml.token_type). llama.cpp reads a control token from text only where it is asked to."""


def tensors(weights: Mapping[str, Tensor], shape: ResolvedModel) -> dict[str, Tensor]:
    """quern's weights with GGUF's names and layouts, without the head if it equals the embedding (a tied head). `gguf`
    maps Hugging Face's names to GGUF's."""
    gguf = library()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.depth)
    theirs = weights_to(weights, shape.depth)
    found = {names.get_name(name, try_suffixes=(".weight",)): weight for name, weight in theirs.items()}
    if torch.equal(weights["head.weight"], weights["embedding.weight"]):
        del found["output.weight"]
    return {name: neighbours(w, shape.head_dim) if name.endswith(ROTATED) else w for name, w in found.items()}


def neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """(H · E, D) with the two channels of each rotary pair side by side: row i + E/2 of a head follows row i."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def metadata(shape: ResolvedModel, tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """Key → str, bool, int (stored as uint32), float (float32) or a list."""
    spare = shape.vocab_size - tokenizer.vocab_size
    if spare < 0:
        raise ValueError(f"the model has {shape.vocab_size:,} embeddings for {tokenizer.vocab_size:,} tokens")
    words = [spell(token) for token in (*(bytes([byte]) for byte in tokenizer.single_bytes), *tokenizer.merges)]
    assistant_end = tokenizer.special("<|assistant_end|>")
    return {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": name,
        "llama.vocab_size": shape.vocab_size,
        "llama.context_length": shape.context,
        "llama.embedding_length": shape.width,
        "llama.block_count": shape.depth,
        "llama.feed_forward_length": mlp_width(shape),
        "llama.rope.dimension_count": shape.head_dim,
        "llama.rope.freq_base": float(shape.rope_base),
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.key_length": shape.head_dim,
        "llama.attention.value_length": shape.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(shape.norm_eps or NORM_EPS),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRE_TOKENIZERS.get(tokenizer.pattern, NEAREST),
        "tokenizer.ggml.tokens": [*words, *tokenizer.special_tokens, *(f"[unused {i}]" for i in range(spare))],
        "tokenizer.ggml.token_type": [
            *[NORMAL] * len(words),
            *[CONTROL] * len(tokenizer.special_tokens),
            *[UNUSED] * spare,
        ],
        "tokenizer.ggml.merges": [f"{spell(left)} {spell(right)}" for left, right in merge_pairs(tokenizer).values()],
        "tokenizer.ggml.bos_token_id": tokenizer.bos,
        "tokenizer.ggml.eos_token_id": assistant_end,
        "tokenizer.ggml.eot_token_id": assistant_end,
        # BOS begins the next document, so it ends a text too. llama.cpp stops at each of these three.
        "tokenizer.ggml.eom_token_id": tokenizer.bos,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.padding_token_id": tokenizer.bos,
        "tokenizer.chat_template": re.sub(r"\{%- (end)?generation -%\}", "", CHAT_TEMPLATE),  # tags of transformers
    }


def other_ids(tokenizer: Tokenizer) -> str:
    """Why llama.cpp would give some texts other ids than the tokenizer does; "" if it does not."""
    lost = len(tokenizer.merges) - len(merge_pairs(tokenizer))
    if lost:
        return f"llama.cpp never forms {lost:,} of the tokenizer's {len(tokenizer.merges):,} merges"
    known = tokenizer.pattern in PRE_TOKENIZERS
    return "" if known else "llama.cpp has no split like this tokenizer's, so ids would differ"


TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
"""quern's names of dtypes, and GGUF's."""
BLOCK = 32
"""Q8_0 stores blocks of so many weights of a row with one scale."""
FP16_MAX = 65_504


def run(
    run_dir: RunDir,
    path: Path,
    *,
    stage: str | None,
    dtype: str,
    accept_other_ids: bool = False,
    log: Callable[[str], None],
) -> Path:
    """Writes the newest intact checkpoint of a stage (None: the last one), and returns the file.

    path: the file (….gguf), or its folder; accept_other_ids: also export a tokenizer whose ids llama.cpp cannot give.

    Raises FileNotFoundError for a missing run, ImportError without `gguf`, ValueError if the file exists, the model is
    no Llama, llama.cpp would give other ids, or fp16 overflows.
    """
    library()
    path = path if path.suffix == ".gguf" else path / f"{run_dir.run}-{dtype}.gguf"
    if path.exists():
        raise ValueError(f"{path} is there already: name another file with --dir, or remove it first")
    loaded = load(run_dir, detect("cpu", "fp32", compile=False), log, stage)
    if type(loaded.model) is not Llama:
        raise ValueError(
            f"run '{run_dir.run}' is no Llama, which alone llama.cpp knows: export a run of `quern pretrain llama`"
        )
    refuse_windows(loaded.recipe.model)
    if difference := other_ids(loaded.tokenizer):
        if not accept_other_ids:
            raise ValueError(f"{difference}: train with --text.digits 1, or accept other ids with --accept-other-ids")
        log(f"warning: {difference}, which makes the model's answers worse")
    shape = loaded.recipe.model
    weights = tensors(loaded.model.state_dict(), shape)
    kinds = kinds_of(weights, TYPES[dtype], log)
    most = library().LlamaFileType["ALL_F32" if dtype == "fp32" else f"MOSTLY_{TYPES[dtype]}"].value
    facts = metadata(shape, loaded.tokenizer, run_dir.run)
    facts |= {"general.file_type": most, "general.quantization_version": 2}
    try:
        write(path, facts, weights, kinds)
    except OSError as error:  # NumPy's, of a full disk, says only how much it has written
        why = f"cannot write {path} ({error.strerror or error})"
        raise OSError(f"{why}: make room there, or choose another --dir") from error
    size = path.stat().st_size
    log(f"step {loaded.step:,} of {loaded.stage}, {size / 1e6:,.1f} MB in {TYPES[dtype]} → {path}")
    return path


def kinds_of(weights: Mapping[str, Tensor], kind: str, log: Callable[[str], None]) -> dict[str, str]:
    """Name → type: `kind` for matrices, F32 for vectors, F16 where Q8_0's blocks do not fit."""
    kinds = {name: kind if weight.dim() > 1 else "F32" for name, weight in weights.items()}
    ragged = [name for name in kinds if kinds[name] == "Q8_0" and weights[name].size(-1) % BLOCK]
    if ragged:
        kinds |= dict.fromkeys(ragged, "F16")
        log(f"Q8_0 needs rows of a multiple of {BLOCK} weights: {len(ragged)} of {len(kinds)} tensors are F16")
    for name, weight in weights.items():
        if kinds[name] == "F16" and (largest := float(weight.abs().max())) > FP16_MAX:
            raise ValueError(f"{name} has a weight of {largest:,.0f}, too large for fp16: export with --dtype bf16")
    return kinds


def write(path: Path, facts: Mapping[str, Any], weights: Mapping[str, Tensor], kinds: Mapping[str, str]) -> None:
    """Writes the file whole or not at all, one tensor in memory at a time. kinds: types of the weights."""
    gguf = library()
    types = {name: gguf.GGMLQuantizationType[kind] for name, kind in kinds.items()}
    with whole_file(path) as temporary:
        writer = gguf.GGUFWriter(temporary, facts["general.architecture"])
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[list] = writer.add_array
        for key, value in facts.items():
            if key != "general.architecture":  # the writer adds it
                add[type(value)](key, value)
        for name, weight in weights.items():
            size = prod(gguf.quants.quant_shape_to_byte_shape(tuple(weight.shape), types[name]))
            writer.add_tensor_info(name, tuple(weight.shape), np.dtype(np.float32), size, raw_dtype=types[name])
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, weight in weights.items():
                array = weight.detach().to(torch.float32).contiguous().numpy()
                writer.write_tensor_data(gguf.quants.quantize(array, types[name]))
        finally:
            writer.close()
    sync_path(path.absolute().parent)


def library() -> Any:
    """The module `gguf`. Raises ImportError, which says how to install it."""
    with extra("export", "GGUF needs an extra package"):
        import gguf
    return gguf
