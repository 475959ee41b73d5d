# Pyright reads this in place of transformers, whose thousands of modules it would bind for a few imports.
from typing import Any

def __getattr__(name: str) -> Any: ...
