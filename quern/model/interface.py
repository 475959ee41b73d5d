"""What every model is to the rest of quern: counting, generation, export and the optimizer ask for no more.

Architectures need not inherit anything; an `nn.Module` with these attributes is a language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from quern.kernels.softcap import Cap
from quern.model.context import CausalContext
from quern.recipe import ModelRecipe

KINDS = ("embedding", "value_embeddings", "head", "matrices", "scalars")
"""What a group of parameters can be counted as (`count.Parameters`). Each parameter of the matrices and of the head is
multiplied with every token; the others are looked up, or too small to count in FLOPs."""


class LanguageModel(Protocol):
    """tokens → normed hidden states → logits. Shapes: B rows, T tokens, D width, V vocabulary."""

    shape: ModelRecipe
    """Resolved."""
    head: nn.Linear
    cap: Cap
    """What the logits go through."""
    windows: list[int | None]
    """For each layer, the tokens that a query sees, itself included; None is all of them."""
    attention_layers: list[int]
    """The layers that attend: the others need no keys and values."""

    group_kinds: ClassVar[Mapping[str, str]]
    """For each group of `parameter_groups`, one of KINDS."""

    @property
    def embedding(self) -> nn.Embedding: ...

    def __call__(self, tokens_BT: Tensor, context: Any) -> Any:
        """tokens: (B, T) integers; context: a `context.Context` → (B, T, D) in the parameters' dtype."""
        ...

    def context(self, tokens_BT: Tensor, window: float = 1.0) -> CausalContext:
        """The context to read whole rows in. window: how far windows that grow in training have come, of 1."""
        ...

    def logits(self, x_BTD: Tensor) -> Tensor:
        """(…, D) → fp32 (…, V)."""
        ...

    def init_parameters(self, generator: torch.Generator) -> None:
        """Fills every parameter; raises ValueError naming one that was left out."""
        ...

    def parameter_groups(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Every parameter once, with its name, by optimizer group."""
        ...
