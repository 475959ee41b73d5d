"""Functions and classes of quern by name: those that a recipe without a file of its own is made of."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

CONSTRUCTORS = frozenset(
    "quern.model.gpt:GPT quern.model.llama:Llama quern.model.unet:UNet quern.optim.groups:table "
    "quern.optim.schedule:warmup_stable_decay quern.recipes.llama:rules quern.recipes.llama_adamw:rules "
    "quern.recipes.unet:rules quern.recipes.unet:schedule".split()
)
"""Callables that a saved recipe may name; all others come from the recipe's own file."""


class Deferred(NamedTuple):
    """A function or class of quern that is imported when it is used, so that a recipe can be read without PyTorch.

    Args:
        path: "module:name", one of `CONSTRUCTORS`.
    """

    path: str

    def __call__(self, *arguments: Any) -> Any:
        return imported(self)(*arguments)


def imported(code: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function or class itself."""
    return pkgutil.resolve_name(code.path) if isinstance(code, Deferred) else code


def code_path(code: Callable[..., Any]) -> str:
    """Returns the name of a function or class, "module:name"."""
    return code.path if isinstance(code, Deferred) else f"{code.__module__}:{code.__qualname__}"
