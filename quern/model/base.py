"""`LanguageModel`: the base class of every architecture, and all that the rest of quern asks of a model.

An architecture builds its modules, runs them in `forward`, and says in class attributes what its parameters are. Each
module initialises what it owns (`init_parameters`) and may name the optimizer group of its parameters
(`optimizer_groups`). An idea overrides one method: `make_block`, `layers`, `context`, `loss`, `logits`.

The one loss (`loss_sum`) is a sum over valid targets divided by the number of valid targets in the whole batch, over
all micro-batches and ranks, so that accumulation and parallelism cannot change the update. Pretraining, SFT and RL
differ in their batches only: `mask` says which targets count, `weight` carries advantages.

Shapes: B rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quern.kernels.cross_entropy import MakeProducts, Products, cross_entropy
from quern.kernels.softcap import Cap, has_kernel
from quern.machine import Attention
from quern.model.context import CausalContext
from quern.model.layers import Draw
from quern.recipe import ResolvedModel

KINDS = ("embedding", "value_embeddings", "head", "matrices", "scalars")
"""The kinds that `count.Parameters` distinguishes."""


class LanguageModel(nn.Module):
    """Tokens → normed hidden states (`forward`) → logits."""

    group_kinds: ClassVar[Mapping[str, str]] = {}
    """The kind of an optimizer group, one of KINDS, where neither its name nor that it holds vectors alone says it."""
    optimizer_groups: ClassVar[Mapping[str, str]] = {}
    """Optimizer group of each parameter or child that is not in the default one. Any module may have this attribute;
    the nearest module that names a parameter decides."""
    default_groups: ClassVar[tuple[str, str, str]] = ("matrices", "value_embeddings", "scalars")
    """Groups of parameters that no module names: matrices inside the blocks, tables of embeddings, all others."""
    compiled_parts: ClassVar[tuple[str, ...]] = ()
    """Methods that are compiled beside the blocks."""
    vocabulary_multiple: ClassVar[int] = 1
    """A vocabulary that comes with its tokenizer is filled up to a multiple of this, for fast products. The ids beyond
    the tokenizer's are never targets; generation, evaluation and export leave them out."""
    lookback: int = 0
    """The most tokens before the current one that `context.previous_tokens` is asked for. A cache keeps as many."""

    remembered: Mapping[str, int] = {}
    """Number of channels of each name that `context.previous` is asked for. A cache keeps the last token's."""

    shape: ResolvedModel
    """Resolved."""
    embedding: nn.Embedding
    blocks: nn.ModuleList
    head: nn.Linear
    cap: Cap
    """The function that bounds the logits."""
    windows: list[int | None]
    """The tokens that a query of each layer sees, itself included; None is all of them."""
    attention_layers: list[int]
    """The layers that attend: the others need no keys and values."""
    shards: int = 1
    """The number of shards among which parallel/ has divided the heads."""
    products: MakeProducts = Products
    """The products of the head in the loss where gradients are recorded. fp8.py replaces them."""
    criterion: Any = staticmethod(cross_entropy)
    """The kernel of the loss. parallel/ replaces it where the head holds a part of the vocabulary."""

    def read_vocabulary(self, tokens: Sequence[bytes]) -> None:
        """Training calls this first with the bytes of each token by id, on which some losses depend."""

    def context(self, tokens_BT: Tensor, progress: float = 1.0) -> CausalContext:
        """The context in which training and evaluation read whole rows. progress: share of the run."""
        return CausalContext(progress=progress)

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Hidden states (…, D) → fp32 logits (…, rows of the head), capped."""
        return self.cap(self.head(x_BTD).float())

    def loss(
        self, x_BTD: Tensor, targets_BT: Tensor, scale_BT: Tensor, context: CausalContext
    ) -> tuple[Tensor, Tensor]:
        """The training loss, Σ scale · nats, and the nats of each token (B, T), which evaluation reports.

        Args:
            x_BTD: Hidden states.
            targets_BT: (B, T) int64.
            scale_BT: (B, T) fp32, the weight of each target's loss; zeros in evaluation.
            context: The context of the forward pass; `context.progress` is the share of the run that is done.
        """
        if not has_kernel(self.cap):  # a cap of an idea: through the logits, so that training and evaluation agree
            losses_BT = nn.functional.cross_entropy(
                self.logits(x_BTD).flatten(0, 1), targets_BT.flatten(), reduction="none"
            ).view(targets_BT.shape)
            return (losses_BT * scale_BT).sum(), losses_BT.detach()
        total, losses = self.criterion(
            x_BTD.flatten(0, 1), self.head.weight, targets_BT.flatten(), scale_BT.flatten(), self.cap, self.products
        )
        return total, losses.view(targets_BT.shape)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Fills every parameter by the `init_parameters(draw)` of its module. Raises ValueError for gaps."""
        draw = Draw(self, seed)
        for module in self.modules():
            if hasattr(module, "init_parameters"):
                cast(Any, module).init_parameters(draw)
        missing = [name for name, _ in self.named_parameters() if name not in draw.filled]
        if missing:
            raise ValueError(f"no initial value for {', '.join(missing)}: set it in init_parameters of its module")

    def parameter_groups(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Every parameter once, with its name, by optimizer group."""
        modules = dict(self.named_modules())
        groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for name, p in self.named_parameters():
            groups.setdefault(self._group(name, p, modules), []).append((name, p))
        return groups

    def _group(self, name: str, p: nn.Parameter, modules: Mapping[str, nn.Module]) -> str:
        parts = name.split(".")
        for at in reversed(range(len(parts))):
            named = getattr(modules[".".join(parts[:at])], "optimizer_groups", {})
            if parts[at] in named:
                return named[parts[at]]
        matrices, tables, others = self.default_groups
        if isinstance(modules[name.rpartition(".")[0]], nn.Embedding):
            return tables
        return matrices if name.startswith("blocks.") and p.ndim >= 2 else others

    def compile(self, **options: Any) -> None:
        """Compiles by block, so that layers of one kind share a compilation. options: options of torch.compile."""
        for block in self.blocks:
            block.compile(**options)
        for name in self.compiled_parts:
            setattr(self, name, torch.compile(getattr(self, name), **options))


def loss_sum(
    model: LanguageModel,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    scale_BT: Tensor,
    progress: float = 1.0,
    attention: Attention | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the model on whole rows; returns Σ scale · nats as a differentiable scalar, and nats of each token (B, T).

    Args:
        tokens_BT, targets_BT: (B, T) int64.
        scale_BT: (B, T) fp32, mask · weight / number of valid targets in the global batch.
        progress: Share of the training run that is done.
    """
    context = model.context(tokens_BT, progress).with_backend(attention)
    return model.loss(model(tokens_BT, context), targets_BT, scale_BT, context)


def recompute(model: Any, blocks: int) -> None:
    """Makes the first `blocks` blocks of a model, or all if it has fewer, keep their inputs only and run again in the
    backward pass (activation checkpointing, arXiv 1604.06174), in place. Call it after compilation.

    Their activations would live longest, and when the backward pass reaches them the later blocks have freed theirs.
    The second run stops at the last tensor that the backward pass needs, so the last product of a block is not
    repeated. It makes the same calls as the first one, so gradients are the same, bit for bit; under tensor parallelism
    the collectives within a block are repeated too (parallel/plan.py).
    """
    for block in model.blocks[:blocks]:
        wrap_calls(block, _keep_inputs)


def wrap_calls(module: nn.Module, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Makes calls of a module, its hooks and compiled code included, go through `wrapper(call, *args, **kwargs)`.
    Returns a function that restores it."""
    before = module._compiled_call_impl  # the function, if any, that nn.Module calls in place of itself
    call = before or module._call_impl
    module._compiled_call_impl = partial(wrapper, call)

    def restore() -> None:
        module._compiled_call_impl = before

    return restore


def _keep_inputs(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    return checkpoint(call, *args, use_reentrant=False, **kwargs)
