"""Who may use a server: host names, API keys with `quern serve keys`, and the link of `quern serve --lan`.

A page of another host can reach a server on this machine by DNS rebinding: its own name then resolves to the server's
address. The browser still sends that name in the Host header, so a server that knows its names is safe.

Of a key, only its SHA-256 hash is kept, in a text file with a hash and the holder's name in each line.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import ipaddress
import re
import secrets
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from typing import Annotated

from quern.flags.check_flags import HELP, Mark, read
from quern.records import read_regular
from quern.temporaries import alone_in, write_whole

ELSEWHERE = "192.0.2.1"
"""An address for documentation (RFC 5737). To choose a route to it sends nothing."""


class Hosts:
    """Tests Host headers: `header in hosts`.

    Accepted are IP addresses, which no one can rebind; localhost and its subdomains; the host name that was bound; this
    machine's name; and the names that the user lists: "*.example.org" for subdomains, "*" for every name.
    """

    def __init__(self, bound: str, named: Sequence[str] = ()) -> None:
        machine = socket.gethostname()
        self._names = {name.lower() for name in ("localhost", bound, machine, f"{machine}.local", *named)}

    def __contains__(self, header: str) -> bool:
        name = header.lower()
        name = name.partition("]")[0].lstrip("[") if name.startswith("[") else name.partition(":")[0]
        try:
            ipaddress.ip_address(name.partition("%")[0])
            return True
        except ValueError:
            pass
        parents = [name.split(".", number)[number] for number in range(1, name.count(".") + 1)]
        patterns = {name, "*", *(f"*.{parent}" for parent in parents)}
        return bool(name) and ("localhost" in parents or bool(self._names & patterns))


class Keys:
    """API keys. hashes: SHA-256 → the holder's name."""

    def __init__(self, hashes: Mapping[bytes, str]) -> None:
        self._hashes = hashes

    def holder(self, authorization: str) -> str | None:
        """The name of the holder of the key in an Authorization header; None for a missing or wrong key."""
        kind, _, key = authorization.partition(" ")
        asked = _digest(key.strip())
        found = [name for known, name in self._hashes.items() if hmac.compare_digest(known, asked)]
        return found[0] if found and kind.lower() == "bearer" else None


class KeysFile(Keys):
    """The keys of a file, read again when it has changed; if it is then unreadable, the last ones stay."""

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self._path, self._log, self._seen = path, log, _version(path)
        super().__init__(_parse(path))
        if not self._hashes:
            raise ValueError(_no_key(path))

    def holder(self, authorization: str) -> str | None:
        """The holder as in `Keys`, by the file as it is now."""
        if (version := _version(self._path)) != self._seen:
            self._seen = version
            try:
                self._hashes = _parse(self._path)
            except ValueError as error:
                self._log(f"{error}; until then, the keys from before are good")
        return super().holder(authorization)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


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
        raise ValueError(f"--keys {path} cannot be read ({reason}): name a file of `quern serve keys add`") from error
    hashes = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words and (not re.fullmatch(r"[0-9a-fA-F]{64}", words[0]) or len(words) != 2):
            raise ValueError(f"{path}:{number}: write the SHA-256 hash of a key, then its holder's name")
        if words:
            hashes[bytes.fromhex(words[0])] = words[1]
    return hashes


def _command(words: str, path: Path) -> str:
    """The command of `quern serve keys` with these words, for a file of keys."""
    return f"`quern serve keys {words}{'' if path == KeysOptions.keys else f' --keys {shlex.quote(str(path))}'}`"


def _no_key(path: Path) -> str:
    return f"{path} has no key: {_command('add NAME', path)} makes one"


def _holders(path: Path) -> list[str]:
    return list(_parse(path).values()) if path.exists() else []


@dataclass
class KeysOptions:
    """Flags of `quern serve keys`."""

    name: Annotated[str, Mark.POSITIONAL] = ""
    """add, remove: the holder of the key, in one word."""
    keys: Path = Path("keys.txt")
    """The file of the keys' hashes."""


def keys_command(arguments: Sequence[str], log: Callable[[str], None]) -> int:
    """Runs `quern serve keys`: adds a holder's key, removes it, or lists the holders. Returns the exit code."""
    does = "add NAME makes a key, remove NAME takes it away, list names the holders"
    action = arguments[0] if arguments else ""
    if action not in ("add", "remove", "list", *HELP):
        raise ValueError(f"keys takes add, remove or list, not '{action}': {does}")
    flags, shown = (arguments, "add|remove|list") if action in HELP else (arguments[1:], action)
    options = read(KeysOptions, flags, prog=f"quern serve keys {shown}", description=f"{does}.")
    name, path = options.name, options.keys
    if action == "list":
        if name:
            raise ValueError(f"keys list takes no name: leave '{name}' out")
        for line in _holders(path) or [_no_key(path)]:
            log(line)
        return 0
    if not re.fullmatch(r"[^\s#]+", name):
        raise ValueError(f"keys {action} NAME: name the holder in one word, without a #")
    file = Path(realpath(path))  # a link stays one, and its file gets the change
    with alone_in(file.parent, log):
        holders = _holders(path)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if action == "remove":
            if name not in holders:
                raise ValueError(f"{path} has no key of {name}: {_command('list', path)} names the holders")
            lines = [line for line in lines if line.partition("#")[0].split()[1:] != [name]]
            told = [f"removed the key of {name} from {path}"]
        else:
            if name in holders:
                again = _command(f"remove {shlex.quote(name)}", path)
                raise ValueError(f"{name} has a key in {path}: remove it first ({again})")
            key = secrets.token_urlsafe(24)
            lines.append(f"{_digest(key).hex()} {name}")
            told = [f"the key of {name}, shown this once: {key}"]
            told.append(f"its hash is in {path}, which a server with --keys {path} reads again by itself")
        write_whole(file, "".join(f"{line}\n" for line in lines))
    for line in told:
        log(line)
    return 0


def lan_address() -> str:
    """This machine's IPv4 address in the network of its default route. Raises ValueError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ELSEWHERE, 9))
            return str(probe.getsockname()[0])
        except OSError:
            raise ValueError("--lan finds no network: connect this machine to one, or leave --lan out") from None


def admit_lan(keys: Keys | None) -> tuple[Keys, Callable[[str, int], str]]:
    """The keys to ask for, and a function that makes an invitation with a QR code from the scheme and the port.

    keys: the user's; None makes one for this start, which is in the link. Raises ValueError without a network.
    """
    import segno

    address, key = lan_address(), secrets.token_urlsafe(24)

    def invite(scheme: str, port: int) -> str:
        link = f"{scheme}://{address}:{port}/" + ("" if keys else f"#key={key}")
        drawn = io.StringIO()
        segno.make(link, micro=False).terminal(drawn, border=2, compact=True)
        told = "the page asks for a key of --keys" if keys else "the link has a key for this start"
        return f"on a phone or another computer of this network ({told}):\n{link}\n{drawn.getvalue()}"

    return keys or Keys({_digest(key): "lan"}), invite
