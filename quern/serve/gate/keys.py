"""API keys: only their SHA-256 hashes are kept, in a text file with a hash and the holder's name in each line."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from quern.flags.check_flags import HELP, Mark, read
from quern.records import read_regular
from quern.temporaries import write_whole


@dataclass
class KeysOptions:
    """Flags of `quern serve keys`."""

    name: Annotated[str, Mark.POSITIONAL] = ""
    """add, remove: the holder of the key, in one word."""
    keys: Path = Path("keys.txt")
    """The file of the keys' hashes."""


def main(arguments: Sequence[str], log: Callable[[str], None]) -> int:
    """Runs `quern serve keys`, and returns its exit code."""
    does = "add NAME makes a key, remove NAME takes it away, list names the holders"
    action = arguments[0] if arguments else ""
    if action not in ("add", "remove", "list", *HELP):
        raise ValueError(f"keys takes add, remove or list, not '{action}': {does}")
    flags, shown = (arguments, "add|remove|list") if action in HELP else (arguments[1:], action)
    options = read(KeysOptions, flags, prog=f"quern serve keys {shown}", description=f"{does}.")
    for line in change_keys(action, options.name, options.keys):
        log(line)
    return 0


def new_key() -> str:
    """Makes a random key of 192 bits."""
    return secrets.token_urlsafe(24)


def digest(key: str) -> bytes:
    """The SHA-256 hash of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """API keys, of which only the SHA-256 hashes are known. hashes: hash → the holder's name."""

    def __init__(self, hashes: Mapping[bytes, str]) -> None:
        self._hashes = hashes

    def holder(self, authorization: str) -> str | None:
        """The name of the holder of the key in an Authorization header; None for a missing or wrong key."""
        kind, _, key = authorization.partition(" ")
        asked = digest(key.strip())
        found = [name for known, name in self._hashes.items() if hmac.compare_digest(known, asked)]
        return found[0] if found and kind.lower() == "bearer" else None


class KeysFile(Keys):
    """The keys of a file, read again when it has changed; if it is then unreadable, the last ones stay."""

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self._path, self._log, self._seen = path, log, _version(path)
        super().__init__(_parse(path))
        if not self._hashes:
            raise ValueError(f"{path} has no key: `quern serve keys add NAME` makes one")

    def holder(self, authorization: str) -> str | None:
        """The same as that of `Keys`, by the file as it is now."""
        if (version := _version(self._path)) != self._seen:
            self._seen = version
            try:
                self._hashes = _parse(self._path)
            except ValueError as error:
                self._log(f"{error}; until then, the keys from before are good")
        return super().holder(authorization)


def _version(path: Path) -> tuple[int, ...]:
    """Facts that change when the file is written or replaced; () where there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _parse(path: Path) -> dict[bytes, str]:
    """Hash → the holder's name."""
    try:
        text = read_regular(path).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no file of UTF-8 text"
        raise ValueError(
            f"--keys {path} cannot be read ({reason}): name the file that `quern serve keys add` writes"
        ) from error
    hashes = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words and (not re.fullmatch(r"[0-9a-fA-F]{64}", words[0]) or len(words) != 2):
            raise ValueError(f"{path}:{number}: write the SHA-256 hash of a key, then its holder's name")
        if words:
            hashes[bytes.fromhex(words[0])] = words[1]
    return hashes


def change_keys(action: str, name: str, path: Path) -> list[str]:
    """Adds a holder's key, removes it, or lists the holders. Returns lines for the user, the new key in
    them."""
    holders = list(_parse(path).values()) if path.exists() else []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if action == "list":
        return holders or [f"{path} has no key: `quern serve keys add NAME` makes one"]
    if not re.fullmatch(r"[^\s#]+", name):
        raise ValueError(f"keys {action} NAME: name the holder in one word, without a #")
    if action == "remove":
        if name not in holders:
            raise ValueError(f"{path} has no key of {name}: `quern serve keys list` names the holders")
        kept = [line for line in lines if line.partition("#")[0].split()[1:] != [name]]
        write_whole(path, "".join(f"{line}\n" for line in kept))
        return [f"removed the key of {name} from {path}"]
    if name in holders:
        raise ValueError(f"{name} has a key in {path}: remove it first (quern serve keys remove {name})")
    key = new_key()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(f"{line}\n" for line in [*lines, f"{digest(key).hex()} {name}"]))
    return [
        f"the key of {name}, shown this once: {key}",
        f"its hash is in {path}, which a server with --keys {path} reads again by itself",
    ]
