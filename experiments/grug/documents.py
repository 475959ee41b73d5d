"""Documents that share a row do not see each other, in the JAX twin: attention's mask has segments.

Hypothesis: attention across documents is noise.
Source: ../document_mask.py, the same idea in PyTorch; a test compares a training step of the two files.
Expected effect: no difference.
Verdict: no difference on rung 0 (-0.0013 bits per byte, 8 pairs). Study ladder-jax.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from quern.grug import model
from quern.grug.attention import AttentionMask, blocked_attention
from quern.grug.state import Grug
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as GPT_RECIPE


def forward(
    params: model.Params, tokens: jax.Array, cfg: ResolvedModel, *, attend: model.Attend = blocked_attention
) -> jax.Array:
    assert cfg.bos is not None, "documents are told apart by their BOS"
    documents = AttentionMask(segment_ids=jnp.cumsum(tokens == cfg.bos, axis=1))
    return model.forward(params, tokens, cfg, mask=documents, attend=attend)


class Documents(Grug):
    attention = blocked_attention
    forward = forward


RECIPE = replace(GPT_RECIPE, name="documents", make_model=Documents)
