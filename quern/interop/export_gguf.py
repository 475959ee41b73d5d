"""Writes a run's Llama as one GGUF file, which llama.cpp and programs that build on it read.

Matrices have the chosen dtype, norms are fp32. llama.cpp computes with the stored values, so only fp32 is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quern.interop.gguf_format import metadata, other_ids, tensors
from quern.interop.llama_format import load_llama
from quern.runs.run_dir import RunDir
from quern.temporaries import sync_path, whole_file
from quern.validate import install

TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
"""quern's names of dtypes, and GGUF's."""
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""general.file_type: what most matrices have."""
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
    """Writes the newest intact checkpoint of a stage (None: the last stage).

    Args:
        run_dir: The run.
        path: The file, which ends in .gguf, or a folder: the file is then named after the run and the dtype.
        stage: The stage to export.
        dtype: A key of `TYPES`.
        accept_other_ids: Also export a tokenizer whose ids llama.cpp cannot give exactly.
        log: Called with lines for the user.

    Returns:
        The file.

    Raises:
        FileNotFoundError: There is no such run.
        ValueError: The file exists, the model is not a Llama, llama.cpp would give other ids, or fp16 overflows.
        ImportError: `gguf` is not installed.
    """
    library()
    path = path if path.suffix == ".gguf" else path / f"{run_dir.run}-{dtype}.gguf"
    if path.exists():
        raise ValueError(f"{path} is there already: name another file with --dir, or remove it first")
    loaded = load_llama(run_dir, stage, log)
    if difference := other_ids(loaded.tokenizer):
        if not accept_other_ids:
            raise ValueError(
                f"{difference}: train with a tokenizer of --text.digits 1 (quern pretrain llama --text.digits 1), "
                "or accept the other ids with --accept-other-ids"
            )
        log(f"warning: {difference}, which makes the model's answers there worse")
    shape = loaded.recipe.model
    weights = tensors(loaded.model.state_dict(), shape)
    kinds = kinds_of(weights, TYPES[dtype], log)
    facts = metadata(shape, loaded.tokenizer, run_dir.run) | {
        "general.file_type": FILE_TYPES[TYPES[dtype]],
        "general.quantization_version": 2,
    }
    write(path, facts, weights, kinds)
    size = path.stat().st_size
    log(f"step {loaded.step:,} of {loaded.stage}, {size / 1e6:,.1f} MB in {TYPES[dtype]} → {path}")
    return path


def kinds_of(weights: Mapping[str, Tensor], kind: str, log: Callable[[str], None]) -> dict[str, str]:
    """Name → GGUF's type of the weight: `kind` for matrices, F32 for vectors, F16 where Q8_0's blocks do not fit.

    Raises:
        ValueError: A weight is too large for fp16.
    """
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
    """Writes the file whole or not at all, one tensor in memory at a time.

    Args:
        path: The file.
        facts: The metadata, key → str, bool, int (uint32), float (float32) or list.
        weights: Name → fp32 tensor, in the order of the file.
        kinds: Name → GGUF's type.
    """
    gguf = library()
    types = {name: gguf.GGMLQuantizationType[kind] for name, kind in kinds.items()}
    with whole_file(path) as temporary:
        writer = gguf.GGUFWriter(temporary, facts["general.architecture"])
        add = {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }
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
    try:
        import gguf
    except ImportError as error:
        raise ImportError(f"GGUF needs an extra package ({error}): {install('export')}") from error
    return gguf
