"""The decode step compiled for fixed numbers of rows, with matrix products in the form that suits few rows on
a CPU.

A step of a small model is a few dozen operations of some microseconds, so what a call costs decides. Compiling is asked
for (`warm_up`), never a surprise in the middle of a reply: it takes some 5 seconds for each number of rows. The length
of the cache that is looked at stays symbolic. Weights are read where they are, but for those of an attention's query,
key and value, which are one product here and copied before each batch (`refresh`): a model may go on training.
"""

import copy
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quern.generate.cache import KVCache, decode
from quern.kernels.cross_entropy import rational_tanh
from quern.model.base import LanguageModel

SPAN = 16  # the part of the cache that a step looks at grows in steps of this
TINY = 1024  # weights in a matrix that is cheaper as a loop than as a call of the library
PROJECTIONS = ("query", "key", "value")
ARGUMENTS = ("tokens_B", "slots_S", "owner", "turned")
SHORT = 513  # slots of a cache of which two sums cost less than the library's attention
MAX_COMPILED = 64  # versions of the step that one process may hold: models times numbers of rows


class FewRows(TorchFunctionMode):
    """While the step is traced for a CPU, writes four operations in a form that is faster there.

    One row: the library's product of a bf16 matrix and a vector costs some 20 µs whatever its size, so it becomes a
    plain sum, which the compiler turns into one loop over the weights; so does a gate's, with any number of rows.
    Several rows: turned, the weights are on the left (w · xᵀ), which is faster or slower with the processor and the
    number of rows (`turned_is_faster`). tanh as the rational function that the loss takes too (within 3e-7), since the
    library's is a call for each vector. A product that is asked for again at once (`CompiledPart`) is
    made once. Attention of one query is two sums over the cache, while that is short.
    """

    def __init__(self, short: bool = True, turned: bool = True) -> None:
        super().__init__()
        self._short, self._turned = short, turned
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
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


def _attend_one(
    q_BH1E: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, visible_B11S: Tensor, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Scaled dot-product attention of a single query, as sums → (B, H, 1, E)."""
    B, H, _, E = q_BH1E.shape
    # As a view of memory the query is computed once; the compiler would take its norm anew for every key.
    q_BH1E = q_BH1E.as_strided(q_BH1E.shape, q_BH1E.stride())
    q_BKGE = q_BH1E.reshape(B, k_BKSE.shape[1], -1, E).float()
    scores_BKGS = (q_BKGE[..., None, :] * k_BKSE[:, :, None].float()).sum(-1) * (E**-0.5 if scale is None else scale)
    scores_BKGS = scores_BKGS.masked_fill(~visible_B11S, float("-inf"))
    weights_BKGS = (scores_BKGS - scores_BKGS.amax(-1, keepdim=True)).exp()
    y_BKGE = (weights_BKGS[..., None] * v_BKSE[:, :, None].float()).sum(-2) / weights_BKGS.sum(-1, keepdim=True)
    return y_BKGE.reshape(B, H, 1, E).to(q_BH1E.dtype)


def decode_few(
    model: LanguageModel, cache: KVCache, tokens_B: Tensor, slots_S: Tensor, owner: int, turned: bool
) -> Tensor:
    """`decode` as FewRows has it. owner: whose version this is."""
    assert owner >= 0  # the compiler checks what is looked at
    with FewRows(cache.max_tokens <= SHORT, turned):
        return decode(model, cache, tokens_B, slots_S)


def decode_many(
    model: LanguageModel, cache: KVCache, tokens_B: Tensor, slots_S: Tensor, owner: int, turned: bool
) -> Tensor:
    """`decode` as it stands. owner: whose version this is."""
    assert owner >= 0
    return decode(model, cache, tokens_B, slots_S)


def turned_is_faster(model: nn.Module, rows: int, rounds: int = 10) -> bool:
    """Whether w · xᵀ of all the model's matrices, one after the other, takes less than x · wᵀ: measured, in turns."""
    pairs = [
        (linear.weight, torch.ones(rows, linear.in_features, dtype=linear.weight.dtype))
        for linear in model.modules()
        if type(linear) is nn.Linear
    ]
    best = {True: float("inf"), False: float("inf")}
    for turned in [True, False] * rounds:
        start = time.perf_counter()
        for weight, x in pairs:
            _ = weight @ x.t() if turned else F.linear(x, weight)
        best[turned] = min(best[turned], time.perf_counter() - start)
    return best[True] < best[False]


class CompiledPart(nn.Module):
    """Some columns of a product that several layers share."""

    merged: Tensor

    def __init__(self, merged: Tensor, first: int, last: int):
        super().__init__()
        self.register_buffer("merged", merged, persistent=False)
        self._first, self._last = first, last

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.merged)[..., self._first : self._last]


class SideBySide:
    """A model that shares all parameters with the one given, whose queries, keys and values are one product.

    It costs the memory of those weights a second time. A model without such layers stays as it is.
    """

    def __init__(self, model: LanguageModel):
        given = cast(nn.Module, model)
        own = copy.deepcopy(given, {id(p): p for p in given.parameters()})
        self.model = cast(LanguageModel, own)
        self._copies: list[tuple[Tensor, Tensor]] = []
        for module in list(own.modules()):
            linears = [getattr(module, name, None) for name in PROJECTIONS]
            if all(type(linear) is nn.Linear and linear.bias is None for linear in linears):
                self._join(module, cast(list[nn.Linear], linears))

    def _join(self, module: nn.Module, linears: list[nn.Linear]) -> None:
        merged = torch.cat([linear.weight.detach() for linear in linears])
        first = 0
        for name, linear in zip(PROJECTIONS, linears, strict=True):
            last = first + linear.out_features
            self._copies.append((merged[first:last], linear.weight))
            setattr(module, name, CompiledPart(merged, first, last))
            first = last

    @torch.no_grad()
    def refresh(self) -> None:
        for mine, original in self._copies:
            mine.copy_(original)


def _of_arguments(guards: Sequence[Any]) -> list[bool]:
    """Which of the compiler's checks are made at every call: whose version it is, and the number of rows. The model is
    the owner's, and so is the cache (`fits`); checking each of their parts would cost a twentieth of a step."""
    return [guard.name in ARGUMENTS for guard in guards]


class CompiledDecode:
    """`decode` for the numbers of rows it has been warmed up for."""

    def __init__(self, model: LanguageModel, context: int):
        self._on_cpu = on_cpu = model.embedding.weight.device.type == "cpu"
        self.rows: list[int] = []
        self._turned: dict[int, bool] = {}
        # One slot more than any step looks at: the two lengths never coincide, and one version serves all.
        self.max_tokens = -(-context // SPAN) * SPAN + 1
        self._given = model
        self._own: SideBySide | None = None
        self._owner = secrets.randbits(48)
        # dynamic=False: numbers of rows stay apart; only what `warm_up` marks is symbolic.
        # On a CPU the calls between the kernels are C++ too: a step has a hundred, at some microseconds from Python.
        self._step = torch.compile(
            decode_few if on_cpu else decode_many,
            fullgraph=True,
            dynamic=False,
            options={"cpp_wrapper": on_cpu, "guard_filter_fn": _of_arguments},
        )

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """Compiles the step for this number of rows, if it is not yet."""
        if rows in self.rows:
            return
        self._turned[rows] = self._on_cpu and rows > 1 and turned_is_faster(cast(nn.Module, self._given), rows)
        cache = KVCache.for_model(self._given, rows, self.max_tokens)
        device = cache.positions_B.device
        slots_S = torch.arange(SPAN, device=device)
        torch._dynamo.mark_dynamic(slots_S, 0)
        with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED):
            self(cache, torch.zeros(rows, dtype=torch.int64, device=device), slots_S)
        self.rows = sorted([*self.rows, rows])

    def seats(self, rows: int) -> int | None:
        """The least number of rows compiled for that holds `rows`; None if there is none."""
        return next((seats for seats in self.rows if seats >= rows), None)

    def _model(self) -> LanguageModel:
        if not self._on_cpu:
            return self._given
        if self._own is None:
            self._own = SideBySide(self._given)
        return self._own.model

    def refresh(self) -> None:
        """The weights as they are now; once before a batch."""
        if self._own is not None:
            self._own.refresh()

    def fits(self, cache: KVCache) -> bool:
        """Whether the step was compiled for such a cache."""
        return cache.max_tokens == self.max_tokens and len(cache.positions_B) in self.rows

    def __call__(self, cache: KVCache, tokens_B: Tensor, slots_S: Tensor) -> Tensor:
        turned = self._turned[len(tokens_B)]
        return self._step(self._model(), cache, tokens_B, slots_S, self._owner, turned)
