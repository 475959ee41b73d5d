"""Made-up data for benchmarks: random batches, and shards of many documents without text; no torch.

Run as a child process (`python -m quern.bench.batches`), it opens such shards and times a loader.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quern.data.batch import Batch
from quern.data.loader import Loader
from quern.data.shards import Corpus
from quern.data.token_file import HEADER_BYTES, VERSIONS, describe, header, write_manifest
from quern.process import resident, serve
from quern.recipe import Resolved

SHARD_TOKENS = 100_000_000


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
