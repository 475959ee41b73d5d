"""Material of the benchmarks: the reference recipe, random batches, shards of many documents without text; no torch.

Run as a child process (`python -m quern.bench.material`), it opens such shards and times a loader.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quern.data.batch import Batch
from quern.data.loader import Loader
from quern.data.shards import Corpus
from quern.data.token_file import HEADER_BYTES, SHARD_TOKENS, VERSIONS, describe, header, write_manifest
from quern.process import resident, serve
from quern.recipe import ModelRecipe, Resolved, TrainRecipe
from quern.recipes.gpt import RECIPE
from quern.resolve import MICRO_BATCH_TOKENS, resolve


@dataclass(frozen=True)
class Sizes:
    """Sizes that follow the device."""

    tokens: int  # of all rows of a call of attention
    width: int  # heads of attention times their dim
    shapes: tuple[tuple[int, int], ...]  # head dim and tokens of a row of each call of attention
    loss: tuple[int, int, int]  # tokens, width and vocabulary
    rows: tuple[int, ...]  # batch sizes of prefill and decode
    prompt_tokens: int  # of a prompt of decode
    reply_tokens: int  # of the reply to it
    product: int  # rows of the matrices that give the matmul peak
    copied: int  # bytes of the copy that gives the bandwidth


CPU_SHAPES = (64, 256), (64, 512), (64, 1024), (64, 2048)
GPU_SHAPES = *((128, T) for T in (16_384, 4096, 1024, 2048, 8192)), *((64, T) for T in (16_384, 4096, 1024))
SIZES = {
    "quick": Sizes(128, 256, ((64, 32), (64, 64)), (512, 32, 4096), (1, 8, 32), 8, 12, 256, 2**20),
    "cpu": Sizes(4096, 256, CPU_SHAPES, (4096, 256, 32_768), (1, 8, 32), 64, 192, 2048, 2**28),
    "cuda": Sizes(16_384, 2048, GPU_SHAPES, (65_536, 768, 32_768), (1, 8, 64, 256), 512, 64, 8192, 2**31),
}


def reference(quick: bool, seed: int, batch_tokens: int | None = None, device: str = "cpu") -> Resolved:
    """Returns the resolved reference recipe of a device, or a tiny one. batch_tokens: tokens of a step;
    by default as many as in the largest micro-batch: 4,096, on "cuda" 32 rows of 2,048."""
    if quick:
        model = ModelRecipe(width=32, heads=2, head_dim=16, vocab_size=512, context=64, windows="L")
        depth, batch_tokens, micro = 2, 128, 128
    elif device == "cuda":
        model, depth, micro = ModelRecipe(vocab_size=32_768, context=2048), 12, 32 * 2048
    else:
        model = ModelRecipe(width=256, heads=4, vocab_size=8192, context=512, windows="L")
        depth, micro = 4, MICRO_BATCH_TOKENS
    batch_tokens = batch_tokens or micro
    train = TrainRecipe(batch_tokens=batch_tokens, micro_batch_tokens=min(batch_tokens, micro), steps=1000)
    return resolve(replace(RECIPE, name="reference", depth=depth, seed=seed, model=model, train=train))


def left_to_itself(recipe: Resolved) -> Resolved:
    """Returns the recipe with the batch size and the steps that it derives from its model."""
    return resolve(replace(recipe, train=TrainRecipe(micro_batch_tokens=recipe.train.micro_batch_tokens)))


def sizes_of(recipe: Resolved) -> dict[str, Any]:
    """Returns the sizes of a resolved recipe for a record."""
    shape = recipe.model
    sizes = {"layers": shape.depth, "width": shape.width, "heads": shape.heads, "vocabulary": shape.vocab_size}
    return sizes | {"context": shape.context, "windows": shape.windows, "batch_tokens": recipe.train.batch_tokens}


def random_batch(recipe: Resolved, seed: int) -> Batch:
    """Returns a global batch of random tokens, in which every target counts."""
    context, batch_tokens = recipe.model.context, recipe.train.batch_tokens
    size = max(1, batch_tokens // context), context + 1
    rows = np.random.default_rng(seed).integers(recipe.model.vocab_size, size=size, dtype=np.int32)
    return Batch.of_rows(rows, np.ones((size[0], context), dtype=bool))


def write_empty_shards(folder: Path, documents: int, mean_tokens: int, seed: int) -> None:
    """Writes shards with about this many documents of log-normal lengths (σ = 1) into an empty folder. All tokens are 0
    and take no space on most file systems."""
    numbers = np.random.Generator(np.random.Philox(seed))
    files: list[dict[str, Any]] = []
    hashed: dict[int, dict[str, Any]] = {}  # shards of one size have the same bytes
    left = documents * mean_tokens
    while left:
        tokens = min(left, SHARD_TOKENS)
        drawn = numbers.lognormal(np.log(mean_tokens) - 0.5, 1.0, 2 * tokens // mean_tokens + 100)
        starts = np.concatenate([[0], np.cumsum(np.maximum(2, drawn.astype(np.int64)))])
        path = folder / f"train-{len(files):05d}.bin"
        with open(path, "wb") as file:
            file.write(header(tokens, VERSIONS[1]))
            file.truncate(HEADER_BYTES + tokens * VERSIONS[1].itemsize)
        index = path.with_suffix(".starts.npy")
        np.save(index, starts[starts < tokens], allow_pickle=False)
        hashed[tokens] = hashed.get(tokens) or describe(path)
        count = int(np.count_nonzero(starts < tokens))
        files.append(
            hashed[tokens] | {"name": path.name, "tokens": tokens, "documents": count, "starts": describe(index)}
        )
        left -= tokens
    split = {"dtype": "uint16", "vocab_size": 2, "bos": 0, "files": files}
    write_manifest(folder, "bench", {"train": split}, {})


def _child(order: dict[str, Any], requests: Iterator[Any]) -> Iterator[dict[str, float]]:
    """Answers each step with the seconds until its batch is there, from the opening of the shards on, and memory."""
    for step in requests:
        began, computed = time.perf_counter(), time.process_time()
        corpus = Corpus.open(order["folder"], "train", fingerprint="bench")
        loader = Loader(corpus, order["context"], order["batch_rows"], order["seed"])
        loader.report()
        loader.batch(step)
        found = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - computed}
        # The most memory of this process, and what it shares with no other one; from Linux.
        found |= {"peak_bytes": resident("VmHWM"), "own_bytes": resident("RssAnon")}
        yield {name: value for name, value in found.items() if value is not None}


if __name__ == "__main__":
    serve(_child)
