"""Activation checkpointing: blocks that keep their inputs only, and run again in the backward pass (arXiv 1604.06174).

The first blocks of the model do so, as many as are asked for: their activations would live longest, and when the
backward pass reaches them those of the later blocks are gone. The second run stops at the last tensor that the backward
pass needs, so the last product of a block is not repeated. It makes the same calls as the first one, so gradients are
the same, bit for bit; under tensor parallelism the collectives within a block are repeated too (parallel/plan.py).
Without gradients nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(model: Any, blocks: int) -> None:
    """Makes the first `blocks` blocks of a model, or all if it has fewer, run again in the backward pass, in place.

    Call it after compilation, which wraps what it finds. Names and parameters do not change.
    """
    for block in model.blocks[:blocks]:
        wrap_calls(block, _keep_inputs)


def wrap_calls(module: nn.Module, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Makes calls of a module, its hooks and compiled code included, go through `wrapper(call, *args, **kwargs)`.
    Returns a function that restores it."""
    before = module._compiled_call_impl  # what nn.Module calls in place of itself, if anything
    call = before or module._call_impl
    module._compiled_call_impl = partial(wrapper, call)

    def restore() -> None:
        module._compiled_call_impl = before

    return restore


def _keep_inputs(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    return checkpoint(call, *args, use_reentrant=False, **kwargs)
