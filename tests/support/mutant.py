"""A kernel's file with one mistake planted in it, to see that a check notices.

    assert with_mistake("quern.kernels.rope_triton", "first * c + second", "first * c - second", deviation) > bar

Meanwhile, whoever imports the module gets the broken one; the file itself is not touched. For modules that are imported
where they are used, as the ones of device code are.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def with_mistake(name: str, right: str, wrong: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns while the module `name` has `wrong` for `right`, which is in its file exactly once."""
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None
    source = Path(found.origin).read_text(encoding="utf-8")
    assert source.count(right) == 1, f"{right!r} stands {source.count(right)} times in {found.origin}"
    as_is = sys.modules.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / Path(found.origin).name  # Triton reads a kernel's source from its file
        path.write_text(source.replace(right, wrong), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
            return function(*arguments)
        finally:
            del sys.modules[name]
            if as_is is not None:
                sys.modules[name] = as_is
