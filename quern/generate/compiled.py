"""The decode step, compiled for fixed numbers of rows, with matrix products suited to few rows on a CPU.

A step of a small model is a few dozen operations of some microseconds each, so call overhead dominates. Compilation
runs only on request (`warm_up`), never within a reply: it takes some 5 seconds for each number of rows. The length of
the cache that a step reads is symbolic. Weights are read in place, except those of an attention's query, key and value:
they form one product here, and are copied before each batch (`refresh`), because the model may be in training.
"""

import copy
import time
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quern import compiler
from quern.generate.cache import KVCache, decode
from quern.kernels.cross_entropy import rational_tanh
from quern.model.base import LanguageModel
from quern.process import environment

SPAN = 16  # the number of slots that a step reads is a multiple of this
TINY = 1024  # a matrix of at most this many weights is faster as a loop than as a library call
PROJECTIONS = ("query", "key", "value")
ARGUMENTS = ("tokens_B", "slots_S", "turned")
SHORT = 513  # up to this many slots, two sums are faster than the library's attention
MAX_COMPILED = 64  # compiled versions of one model: its numbers of rows
TRY_SECONDS = 20.0  # for which `warm_up` waits until no other thread switches the compiler off


class FewRows(TorchFunctionMode):
    """Replaces four operations by forms that are faster on a CPU, while the step is traced.

    - Product with one row: the library's product of a bf16 matrix and a vector costs some 20 µs at any size. A plain
      sum compiles to one loop over the weights. The small matrices of gates use it for any number of rows.
    - Product with several rows: `turned` puts the weights on the left (w · xᵀ); whether that is faster depends on the
      processor and the number of rows (`turned_is_faster`). A product that repeats the last one (`CompiledPart`) is
      computed once.
    - tanh: the rational function of the loss (within 3e-7); the library's tanh is a call per vector.
    - Attention of one query: two sums over the cache, if the cache is short.
    """

    def __init__(self, short: bool = True, turned: bool = True) -> None:
        super().__init__()
        self._short, self._turned = short, turned
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs and (len(args) == 2 or args[2] is None):
            x, weight = args[:2]
            if self._last is None or self._last[0] is not x or self._last[1] is not weight:
                self._last = x, weight, self._product(x, weight)
            return self._last[2]
        if func is F.scaled_dot_product_attention and self._short:
            return _attend_one(*args, **(kwargs or {}))
        if func is torch.tanh:
            return rational_tanh(args[0])
        return func(*args, **(kwargs or {}))

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.numel() == x.shape[-1] or weight.numel() <= TINY:
            return (x.unsqueeze(-2).float() * weight.float()).sum(-1).to(x.dtype)
        if not self._turned:
            return F.linear(x, weight)
        return (weight @ x.reshape(-1, x.shape[-1]).t()).t().reshape(*x.shape[:-1], -1)


def _attend_one(q_BKGE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, visible_B11S: Tensor, scale: float | None) -> Tensor:
    """Scaled dot-product attention of a single query of each head, as sums → (B, K, G, E)."""
    # as_strided forces the query into memory; otherwise the compiler recomputes its norm for every key.
    q = q_BKGE.as_strided(q_BKGE.shape, q_BKGE.stride()).float()
    scores_BKGS = (q[..., None, :] * k_BKSE[:, :, None].float()).sum(-1)
    scores_BKGS = scores_BKGS * (q.size(-1) ** -0.5 if scale is None else scale)
    scores_BKGS = scores_BKGS.masked_fill(~visible_B11S, float("-inf"))
    weights_BKGS = (scores_BKGS - scores_BKGS.amax(-1, keepdim=True)).exp()
    y_BKGE = (weights_BKGS[..., None] * v_BKSE[:, :, None].float()).sum(-2) / weights_BKGS.sum(-1, keepdim=True)
    return y_BKGE.to(q_BKGE.dtype)


def _step(
    model: LanguageModel, cache: KVCache, tokens_B: Tensor, slots_S: Tensor, as_written: list[bool], turned: bool | None
) -> Tensor:
    """`decode`, under `FewRows` unless turned is None. as_written: gets True when this runs without the compiler."""
    if not torch.compiler.is_compiling():
        as_written[:] = [True]
    if turned is None:
        return decode(model, cache, tokens_B, slots_S)
    with FewRows(cache.max_tokens <= SHORT, turned):
        return decode(model, cache, tokens_B, slots_S)


def turned_is_faster(model: nn.Module, rows: int) -> bool:
    """Measures alternately whether w · xᵀ of all the model's matrices is faster than x · wᵀ."""
    pairs = [
        (linear.weight, torch.ones(rows, linear.in_features, dtype=linear.weight.dtype))
        for linear in model.modules()
        if type(linear) is nn.Linear
    ]
    best = {True: float("inf"), False: float("inf")}
    for turned in [True, False] * 4:
        start = time.perf_counter()
        for weight, x in pairs:
            _ = weight @ x.t() if turned else F.linear(x, weight)
        best[turned] = min(best[turned], time.perf_counter() - start)
    return best[True] < best[False]


class CompiledPart(nn.Module):
    """A range of columns of a product that several layers share."""

    def __init__(self, merged: Tensor, columns: slice):
        super().__init__()
        self.register_buffer("merged", merged, persistent=False)
        self._columns = columns

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, cast(Tensor, self.merged))[..., self._columns]


def _side_by_side(model: LanguageModel) -> tuple[LanguageModel, list[tuple[Tensor, Tensor]]]:
    """A copy of a model that shares its parameters and computes query, key and value as one product.

    Also returns the merged weights with the original ones. They take additional memory.
    """
    given, copies = cast(nn.Module, model), list[tuple[Tensor, Tensor]]()
    own = copy.deepcopy(given, {id(p): p for p in given.parameters()})
    for module in list(own.modules()):
        linears: list[Any] = [getattr(module, name, None) for name in PROJECTIONS]
        if all(type(linear) is nn.Linear and linear.bias is None for linear in linears):
            merged, first = torch.cat([linear.weight.detach() for linear in linears]), 0
            for name, linear in zip(PROJECTIONS, linears, strict=True):
                columns = slice(first, first := first + linear.out_features)
                copies.append((merged[columns], linear.weight))
                setattr(module, name, CompiledPart(merged, columns))
    return cast(LanguageModel, own), copies


class CompiledDecode:
    """`decode` for the numbers of rows it has been warmed up for."""

    def __init__(self, model: LanguageModel, context: int):
        self._on_cpu = on_cpu = model.embedding.weight.device.type == "cpu"
        self.rows: list[int] = []
        self._turned: dict[int, bool | None] = {}
        # One slot more than any step reads: the two lengths always differ, so one version serves all.
        self.max_tokens = -(-context // SPAN) * SPAN + 1
        self._given = self._model = model
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._as_written = [False]
        # dynamic=False: each number of rows has its own version; only the length that `warm_up` marks is symbolic.
        # On a CPU, the hundred calls between kernels are C++ too: from Python each takes some microseconds.
        # Guards are on the rows: those on the parts of the model would cost a twentieth of a step. The compiler keeps
        # versions by code, so each model has a copy of the code, which goes with it.
        options = {"cpp_wrapper": on_cpu, "guard_filter_fn": lambda guards: [one.name in ARGUMENTS for one in guards]}
        step = FunctionType(_step.__code__.replace(), _step.__globals__, _step.__name__)
        self._step = torch.compile(step, fullgraph=True, dynamic=False, options=options)

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """Compiles the step for this number of rows, unless it is compiled already. Raises RuntimeError if other
        threads keep the compiler off (`compiler.eager`)."""
        if rows in self.rows:
            return
        if self._on_cpu and not self.rows:
            self._model, self._copies = _side_by_side(self._given)
        self._turned[rows] = None
        if self._on_cpu:
            self._turned[rows] = rows > 1 and turned_is_faster(cast(nn.Module, self._given), rows)
        cache = KVCache(self._given, rows, self.max_tokens)
        device = cache.positions_B.device
        slots_S = torch.arange(SPAN, device=device)
        torch._dynamo.mark_dynamic(slots_S, 0)
        off = compiler.is_eager() or environment().get("TORCHDYNAMO_DISABLE") == "1"
        until, tokens_B = time.monotonic() + TRY_SECONDS, torch.zeros(rows, dtype=torch.int64, device=device)
        while True:  # as long as another thread has switched the compiler off
            self._as_written[:] = [False]
            try:
                with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED):
                    self(cache, tokens_B, slots_S)
            except RuntimeError:  # torch may notice that the step ran as it is written
                if not self._as_written[0]:
                    raise
            if off or not self._as_written[0]:
                break
            if time.monotonic() > until:
                raise RuntimeError("the decode step was not compiled, while other threads ran without the compiler")
        self.rows = sorted([*self.rows, rows])

    def seats(self, rows: int) -> int | None:
        """The smallest compiled number of rows that is at least `rows`; None if there is none."""
        return next((seats for seats in self.rows if seats >= rows), None)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the model's current weights; called before each batch."""
        for mine, original in self._copies:
            mine.copy_(original)

    def fits(self, cache: KVCache) -> bool:
        """Whether the step was compiled for this shape of cache."""
        return cache.max_tokens == self.max_tokens and len(cache.positions_B) in self.rows

    def __call__(self, cache: KVCache, tokens_B: Tensor, slots_S: Tensor) -> Tensor:
        turned = self._turned[len(tokens_B)]
        return self._step(self._model, cache, tokens_B, slots_S, self._as_written, turned)
