"""The costs of a model: parameters in three conventions, FLOPs of training, size of the key-value cache.

The model itself is counted. It says what its groups of parameters are (`base.KINDS`), and torch counts the matrix
products of its forward pass, loss, backward pass and update on tensors without memory (`weightless`). So an idea needs
no hook to be counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quern import compiler
from quern.data.batch import Batch
from quern.kernels.attention.attend import MaskSpec
from quern.kernels.attention.autotune import Backend
from quern.model.base import KINDS, LanguageModel
from quern.model.context import CausalContext
from quern.optim.groups import ParameterGroup, dry_run, make_groups
from quern.recipe import Resolved

RESOLUTION = 1 / 512
"""Share of a run within which a change of the products per token is found."""


@dataclass(frozen=True)
class Parameters:
    """total: every parameter (Chinchilla's convention, arXiv 2203.15556); kaplan: matrices and head, no embeddings
    (arXiv 2001.08361); transformer: the matrices inside the blocks alone."""

    total: int
    kaplan: int
    transformer: int
    embedding: int
    value_embeddings: int
    head: int
    scalars: int


def kv_elements_per_token(model: LanguageModel) -> int:
    """Keys and values that one token adds to a cache of a whole model, before any window limits it."""
    return 2 * len(model.attention_layers) * model.shape.kv_heads * model.shape.head_dim


def weightless(recipe: Resolved, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a resolved recipe on the meta device, where the id of BOS, still unknown, does not matter."""
    bos = 0 if recipe.model.bos is None else recipe.model.bos
    with torch.device("meta"):
        return recipe.make_model(replace(recipe.model, bos=bos)).to(dtype=dtype)


def parameters(recipe: Resolved) -> Parameters:
    """Parameters of a resolved recipe's model."""
    return count(weightless(recipe))


def count(model: LanguageModel) -> Parameters:
    """Counts a whole model, before it is cut for several ranks. Raises ValueError for a group without a kind."""
    sizes: dict[str, int] = dict.fromkeys(KINDS, 0)
    for group, members in model.parameter_groups().items():
        vectors = all(p.ndim < 2 for _, p in members)
        kind = model.group_kinds.get(group, group if group in sizes else "scalars" if vectors else None)
        if kind not in sizes:
            raise ValueError(f"{type(model).__name__}.group_kinds counts '{group}' as {kind}: use {', '.join(KINDS)}")
        sizes[kind] += sum(p.numel() for _, p in members)
    return of_kinds(sizes)


def of_kinds(sizes: Mapping[str, int]) -> Parameters:
    """The counts from the number of parameters of each of `KINDS`."""
    others = dict(sizes)
    matrices = others.pop("matrices")
    return Parameters(sum(sizes.values()), kaplan=matrices + sizes["head"], transformer=matrices, **others)


# FLOPs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flops:
    """FLOPs of training by part.

    Args:
        products: Matrix products of the forward and the backward pass over all positions, padding included, without
            those of attention.
        attention: Products of queries, keys and values over the pairs that see each other, forward and backward.
            Nothing is added for what a kernel computes again or beyond the mask.
        update: Matrix products of the optimizer.
    """

    products: float = 0
    attention: float = 0
    update: float = 0

    @property
    def model(self) -> float:
        """FLOPs of the model alone, as the MFU has them."""
        return self.products + self.attention

    @property
    def total(self) -> float:
        return self.products + self.attention + self.update

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.products + other.products, self.attention + other.attention, self.update + other.update)


class FlopCounter:
    """Counts the FLOPs of a resolved recipe's training steps; it is called with a batch.

    The products of a position are counted on one row, and again where the model asks how much of a run is done and they
    change with it. Windows and documents are taken from each batch.
    """

    def __init__(self, recipe: Resolved) -> None:
        self._model: LanguageModel = weightless(recipe)
        other_than_bos = 0 if recipe.model.bos else 1
        self._row = torch.full((1, recipe.model.context), other_than_bos)
        self._products: dict[float, float] = {}
        self._asks = False
        self._spans: dict[tuple[int | None, ...], Counter[int | None]] = {}
        self._rules = recipe.make_rules(recipe)

    @cached_property
    def update(self) -> float:
        """FLOPs of the update of one step; of a group that is updated every n-th step, its n-th part."""
        groups = make_groups(self._model.parameter_groups(), self._rules, self._model.named_parameters())
        return sum(_products(dry_run(group.rule, p, p.dtype)) / group.every for group in groups for p in _stacks(group))

    def __call__(self, batch: Batch, progress: float) -> Flops:
        """FLOPs of a training step on the rows of `batch`. progress: share of the run that is done, from 0 to 1."""
        context = self._model.context(torch.from_numpy(batch.tokens), progress)
        windows = self._windows(context)
        if windows not in self._spans:
            self._trace(progress)
        seen = _visible_keys(batch, context.documents_BT)
        attention = sum(
            per_pair * int(seen.sum() if window is None else np.minimum(seen, window).sum())
            for window, per_pair in self._spans[windows].items()
        )
        return Flops(batch.tokens.size * self._products_at(progress), attention, self.update)

    def step(self, batch_tokens: int) -> Flops:
        """FLOPs of a step in rows of one document each, at the end of a run."""
        row = self._row.numpy()
        one = self(Batch(row, row, row >= 0), 1.0)
        rows = batch_tokens / row.size
        return Flops(rows * one.products, rows * one.attention, self.update)

    def per_token(self) -> float:
        """FLOPs of the model per token of such a step."""
        return self.step(1).model

    def _products_at(self, progress: float) -> float:
        """FLOPs of the products of one position. The changes during a run are searched by bisection."""
        if self._products and not self._asks:
            return next(iter(self._products.values()))
        low, high = 0.0, 1.0
        while progress not in self._products:
            if high - low <= RESOLUTION or (high - low < 1 and self._known(low) == self._known(high)):
                return self._known(low)
            middle = (low + high) / 2
            low, high = (low, middle) if progress < middle else (middle, high)
        return self._products[progress]

    def _known(self, progress: float) -> float:
        if progress not in self._products:
            self._trace(progress)
        return self._products[progress]

    def _trace(self, progress: float) -> None:
        """Runs a row forward and backward, which counts its products and, by window, attention's for a visible pair."""
        spans: Counter[int | None] = Counter()

        def attend(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
            # The scores and the mix of the values; backward two products for each of them.
            spans[_size(mask.window)] += 3 * 2 * q_BTHE.size(2) * (q_BTHE.size(3) + v_BTKE.size(3))
            # Attention's shape and gradients of all inputs, without a product.
            return q_BTHE[..., :1] + (k_BTKE[..., :1] + v_BTKE).repeat_interleave(q_BTHE.size(2) // k_BTKE.size(2), 2)

        context = self._model.context(self._row, progress).with_backend(Backend("none", attend))
        if type(context) is CausalContext:
            context = _Watched(context)
        row = self._row.to("meta")

        def train() -> None:
            with compiler.eager():
                scale = torch.ones(row.shape, device="meta")
                loss, _ = self._model.loss(self._model(row, context), row, scale, context)
                loss.backward()

        self._products[progress] = _products(train) / row.numel()
        own = type(self._model).context is not LanguageModel.context
        self._asks |= own or not isinstance(context, _Watched) or context.asked
        self._spans[self._windows(context)] = spans

    def _windows(self, context: CausalContext) -> tuple[int | None, ...]:
        return tuple(_size(window) for window in context.windows(self._model.windows))


@dataclass(frozen=True)
class _Counted:
    """The parts of a recipe that its FLOPs depend on."""

    make_model: Callable[..., Any]
    model: Any
    make_rules: Callable[..., Any]
    optim: Any
    recipe: Resolved = field(compare=False)


@lru_cache(maxsize=16)
def _counter(counted: _Counted) -> FlopCounter:
    return FlopCounter(counted.recipe)


def flop_counter(recipe: Resolved) -> FlopCounter:
    """Returns the counter of a resolved recipe's steps. Recipes of the same model and the same rules share it."""
    return _counter(_Counted(recipe.make_model, recipe.model, recipe.make_rules, recipe.optim, recipe))


class _Watched(CausalContext):
    """Notes whether the model asks how much of the run is done."""

    def __init__(self, context: CausalContext) -> None:
        vars(self).update(vars(context), asked=False)

    def __getattribute__(self, name: str) -> Any:
        if name == "progress":
            self.asked = True
        return super().__getattribute__(name)


def _size(window: int | Tensor | None) -> int | None:
    return None if window is None else int(window)


def _stacks(group: ParameterGroup) -> list[Tensor]:
    """The matrices of a group whose rule takes stacks of them, one stack (N, R, C) for each shape."""
    stacks: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
    for _, p in group.parameters if group.rule.stacked else ():
        stacks[p.shape[-2:]].append(p.detach().view(-1, *p.shape[-2:]))
    return [torch.cat(matrices) for matrices in stacks.values()]


def _visible_keys(batch: Batch, documents_BT: Tensor | None) -> np.ndarray:
    """The number of keys that each query sees without a window, (B, T)."""
    rows, T = batch.tokens.shape
    places = np.arange(T)
    if documents_BT is None:
        return np.broadcast_to(places + 1, (rows, T))
    documents = documents_BT.numpy()
    begins = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
    return places + 1 - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


def _products(function: Callable[[], None]) -> float:
    """The FLOPs of the matrix products of a call."""
    from torch.utils.flop_counter import FlopCounterMode  # late: it imports Triton

    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()
