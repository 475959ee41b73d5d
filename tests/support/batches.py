"""What two loaders are compared by."""

import hashlib

from quern.data.batch import Batches


def token_hash(loader: Batches, step: int) -> str:
    """SHA-256 (hex) of the global batch of a step."""
    batch = loader.batch(step)
    digest = hashlib.sha256()
    for array in (batch.tokens, batch.targets, batch.mask):
        digest.update(array.tobytes())
    return digest.hexdigest()
