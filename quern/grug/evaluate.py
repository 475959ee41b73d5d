"""Bits per byte on the validation text, as quern/eval/bits_per_byte.py measures it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from quern.data.loader import windows
from quern.data.shards import Corpus
from quern.grug.mesh import BATCH, place
from quern.grug.model import Params
from quern.grug.state import StepConfig, eval_step


def validate(
    params: Params, corpus: Corpus, token_bytes: np.ndarray, rows: int, mesh: Mesh, cfg: StepConfig
) -> dict[str, Any]:
    """val_bpb and val_loss (nats per token) over every target of the corpus that stands for at least one byte.

    rows: of a batch, a multiple of the parts that a batch is cut in. Sums are float64. Raises ValueError when no
    target counts.
    """
    context = cfg.model.context
    assert context
    table = np.asarray(token_bytes, dtype=np.int64)
    nats, tokens, size = 0.0, 0, 0
    # Windows come in widths of multiples of this, and each width is compiled once.
    for batch in windows(corpus, context, rows=rows, multiple=max(64, context // 4)):
        bytes_BT = np.where(batch.mask, table[np.where(batch.mask, batch.targets, 0)], 0)
        counts_BT = bytes_BT > 0
        if not counts_BT.any():
            continue
        inputs, targets = (place(x, P(BATCH, None), mesh) for x in (batch.tokens, batch.targets))
        losses_BT = np.asarray(eval_step(params, inputs, targets, cfg), dtype=np.float64)
        nats += float(losses_BT[counts_BT].sum())
        tokens += int(counts_BT.sum())
        size += int(bytes_BT.sum())
    if not size:
        raise ValueError("bits per byte needs at least one target that stands for text: hand in more validation text")
    return {"val_bpb": nats / (math.log(2) * size), "val_loss": nats / tokens}
