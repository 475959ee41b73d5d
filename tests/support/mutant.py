"""A kernel's file with one mistake planted in it, to see that a check notices.

    with planted("quern.kernels.rope_triton", "first * c + second * s", "first * c - second * s"):
        assert deviation() > bar

Inside, whoever imports the module gets the broken one; the file itself is not touched. For modules that are imported
where they are used, as the ones of device code are.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def planted(name: str, right: str, wrong: str) -> Iterator[None]:
    """The module `name` with `wrong` instead of `right`, which must stand in its file exactly once."""
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
            yield
        finally:
            del sys.modules[name]
            if as_is is not None:
                sys.modules[name] = as_is
