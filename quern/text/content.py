"""Content fingerprints of files, with a cache of their hashes.

The cache is one JSON file: absolute path → size in bytes, mtime and ctime in ns, SHA-256. A file is hashed again when
its size or a time differs. A damaged or missing cache is rebuilt; deleted files are dropped from it.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from quern.records import read_json
from quern.temporaries import write_whole

CHUNK_BYTES = 1 << 20


def content_fingerprint(paths: Iterable[Path], cache: Path, progress: Callable[[int], None]) -> str:
    """Hashes the contents of files in the given order; names, paths and times do not matter.

    Args:
        cache: The JSON file of known digests; written when something changed.
        progress: Called with the number of bytes hashed so far.

    Returns:
        SHA-256 (hex) over the SHA-256 of each file.

    Raises:
        OSError: A file cannot be read, or the cache cannot be written.
    """
    known = _read(cache)
    kept = {name: entry for name, entry in known.items() if Path(name).exists()}
    done = 0
    whole = hashlib.sha256()
    for path in paths:
        info, name = path.stat(), str(path.resolve())
        mark = [info.st_size, info.st_mtime_ns, info.st_ctime_ns]
        if kept.get(name, [])[:3] != mark:
            digest = hashlib.sha256()
            with open(path, "rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
                    done += len(chunk)
                    progress(done)
            kept[name] = [*mark, digest.hexdigest()]
        whole.update(bytes.fromhex(kept[name][3]))
    if kept != known:
        write_whole(cache, json.dumps(kept, indent=1))
    return whole.hexdigest()


_Entry = tuple[int, int, int, Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]]
"""Size, times of change in nanoseconds, and SHA-256 of a file."""


def _read(cache: Path) -> dict[str, list[Any]]:
    try:
        return {name: [*entry] for name, entry in read_json(cache, dict[str, _Entry]).items()}
    except (FileNotFoundError, ValueError):
        return {}
