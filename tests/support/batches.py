"""Small loaders, and figures by which two are compared."""

import hashlib

from quern.data.batch import Batches
from quern.data.loader import Loader


def epoch_of(loader: Loader, step: int) -> int:
    """The epoch of the first row of a step."""
    first = step * loader.batch_rows
    loader._find(first, silent=True)
    return loader._group_of(next(turn for turn, _, end in loader._chunks if first < end))[0]


def sized(chunk_documents: int, buffer: int = 1000, kind: type[Loader] = Loader) -> type[Loader]:
    """A loader with smaller chunks and buffer."""
    return type(kind.__name__, (kind,), {"chunk_documents": chunk_documents, "buffer": buffer})


def token_hash(loader: Batches, step: int) -> str:
    """SHA-256 (hex) of the global batch of a step."""
    batch = loader.batch(step)
    digest = hashlib.sha256()
    for array in (batch.tokens, batch.targets, batch.mask):
        digest.update(array.tobytes())
    return digest.hexdigest()
