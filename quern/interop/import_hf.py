"""`quern import`: turns a Llama in Hugging Face's format into a run, for evaluation, fine-tuning and chat.

The folder holds config.json, weights in safetensors (one file or several, never a pickle), and a tokenizer.json in
quern's form, which can also be given separately.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from quern.interop.llama_format import shape_from, weights_from
from quern.machine import detect
from quern.recipe import Recipe
from quern.records import FileName, read_json
from quern.resolve import resolve
from quern.runs.origin import Origin, with_absolute_paths
from quern.runs.run_dir import RunDir
from quern.runs.training import model_facts
from quern.stages.session import describe_run, open_folder
from quern.temporaries import remove_whole
from quern.text.hugging_face import read_tokenizer
from quern.text.tokenizer import FILE_FORMAT, Tokenizer
from quern.train import checkpoint
from quern.train.state import build_model, build_state

LFS = b"version https://git-lfs.github.com/"
"""The beginning of the file that a clone without Git LFS has in the place of a large one."""


def run(
    folder: Path,
    run_dir: RunDir,
    recipe: Recipe,
    *,
    stage: str,
    tokenizer: Path | None,
    log: Callable[[str], None],
    command: str = "",
) -> None:
    """Creates the run. Its fp32 masters equal the weights in the folder.

    recipe: unresolved, of the architecture; tokenizer: a tokenizer.json of quern, None for the one in the folder;
    command: the one that was given, for run.json.

    Raises FileNotFoundError for a missing file, ValueError for another kind of model, or if the run exists.
    """
    if run_dir.folder.exists():
        raise ValueError(f"there is a run '{run_dir.run}' already: name another one with --run, or remove that one")
    if not (described := folder / "config.json").is_file():
        raise FileNotFoundError(f"there is no {described}: give a folder that holds a Llama in Hugging Face's format")
    config = read_json(described, dict[str, Any])
    try:
        shape = shape_from(config)
        words = _read_tokenizer(tokenizer or folder / "tokenizer.json")
        if words.vocab_size > shape.vocab_size:
            raise ValueError(f"the tokenizer has {words.vocab_size:,} tokens, and the model {shape.vocab_size:,}")
        tied = bool(config.get("tie_word_embeddings", False))
        weights = weights_from(_read_weights(folder), shape.depth, tied=tied)
        resolved = resolve(replace(with_absolute_paths(recipe), depth=shape.depth, model=replace(shape, bos=words.bos)))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    machine = detect("cpu", "fp32", compile=False)
    try:
        state = build_state(resolved, machine, build_model(resolved, machine, None, weights))
    except ValueError as error:
        raise ValueError(f"{folder}: config.json does not belong to these weights: {error}") from error
    run_dir.folder.mkdir(parents=True)
    with contextlib.ExitStack() as undo:
        undo.callback(remove_whole, run_dir.folder)
        words.save(run_dir.folder / "tokenizer.json")
        facts = {"imported": str(folder), "model": model_facts(resolved, state.model, machine)}
        describe_run(run_dir, machine, command, facts)
        origin = Origin(words.fingerprint, recipe=resolved.to_json())
        with open_folder(run_dir.stage(stage), origin, None) as records:
            records.event("import", folder=str(folder))
            records.flush()
            # Last: a run without a checkpoint counts as untrained.
            meta = origin.meta() | {"state": state.meta()}
            checkpoint.save(run_dir.checkpoints(stage), state.step, state.tensors(), meta, keep=1)
        undo.pop_all()
    log(f"{len(weights):,} weights of {folder} are now run '{run_dir.run}' → {run_dir.folder}")


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: give quern's tokenizer.json of this model with --tokenizer")
    body = read_json(path, dict[str, Any])
    if body.get("format") == FILE_FORMAT:
        return Tokenizer.load(path)
    try:
        tokenizer = read_tokenizer(body)
        if any(entry["content"] not in tokenizer.special_ids for entry in body["added_tokens"]) or (
            tokenizer.vocab_size > len({*body["model"]["vocab"], *(entry["content"] for entry in body["added_tokens"])})
        ):
            raise ValueError("its special tokens are not quern's, and the model has no others for chats")
    except ValueError as error:
        raise ValueError(f"{path} is not a tokenizer that quern can import: {error}") from error
    return tokenizer


class _Index(TypedDict):
    weight_map: Annotated[dict[str, FileName], msgspec.Meta(min_length=1)]


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor in fp32, from one file or from the files that an index names."""
    names, index, found = ["model.safetensors"], folder / "model.safetensors.index.json", dict[str, Tensor]()
    if index.exists():
        names = sorted(set(read_json(index, _Index, "write the folder again")["weight_map"].values()))
    for name in names:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"there is no {path}: only safetensors are read, as save_pretrained writes them")
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            with path.open("rb") as file:
                why = "run `git lfs pull`, which fetches it" if file.read(len(LFS)) == LFS else error
            raise ValueError(f"{path} is damaged: {why}") from error
        if twice := sorted(found.keys() & tensors.keys()):
            raise ValueError(f"{name} holds {twice[0]}, which another file holds too: write the folder again")
        for key, tensor in tensors.items():
            if not tensor.is_floating_point() or not (plain := tensor.float()).isfinite().all():
                raise ValueError(f"{name}: {key} ({tensor.dtype}) must hold finite floating-point numbers")
            found[key] = plain
    return found
