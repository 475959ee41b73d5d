"""llama.cpp in a child process, the oracle of GGUF export: loads a file, gives ids, probabilities and chat prompts.

It is the prebuilt binary of the npm package node-llama-cpp. npm installs it once into pytest's cache (85 MB, about
10 s). Besides axe-core and, in a campaign, the clients of tests/serve/test_clients.py, it is the one thing that the
suite fetches from another machine: npm is a child process, which the guard of tests/conftest.py does not reach. Where
npm is missing or cannot install it, the tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.line_server import LineServer

VERSION = "3.22.1"
PACKAGES = (f"node-llama-cpp@{VERSION}", f"@node-llama-cpp/linux-x64@{VERSION}")
SERVER = Path(__file__).with_suffix(".mjs")
LEAST_NODE = 20
INSTALL_SECONDS = 150


class NoLlamaCpp(Exception):
    """llama.cpp cannot be had here; the message says why."""


def install(cache: Path) -> Path:
    """The folder with llama.cpp in it, installed unless it is there. Raises NoLlamaCpp."""
    if shutil.which("npm") is None or _node_version() < LEAST_NODE:
        raise NoLlamaCpp(f"llama.cpp comes from npm: install Node.js {LEAST_NODE} or newer, with npm")
    folder = cache / f"node-llama-cpp-{VERSION}"
    if folder.exists():
        return folder
    temporary = cache / f".tmp-{uuid.uuid4().hex}"
    temporary.mkdir(parents=True)
    (temporary / "package.json").write_text('{"private": true}', encoding="utf-8")
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--omit=optional"]
    command += ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", *PACKAGES]
    try:
        done = subprocess.run(
            command, cwd=temporary, capture_output=True, encoding="utf-8", timeout=INSTALL_SECONDS, check=False
        )
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("npm error")]
            raise NoLlamaCpp(f"npm could not install {PACKAGES[0]}: {'; '.join(said[:4])}")
        os.rename(temporary, folder)
    except subprocess.TimeoutExpired as error:
        raise NoLlamaCpp(f"npm did not install {PACKAGES[0]} within {INSTALL_SECONDS} s") from error
    except OSError:
        if not folder.exists():  # else another process was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _node_version() -> int:
    """The first number of Node.js's version, 0 without it."""
    if shutil.which("node") is None:
        return 0
    said = subprocess.run(["node", "--version"], capture_output=True, encoding="utf-8", check=True).stdout
    return int(said.removeprefix("v").split(".")[0])


class LlamaCpp(LineServer):
    """A running llama.cpp; `open` chooses the file that the other methods use."""

    def __init__(self, cache: Path) -> None:
        """Raises NoLlamaCpp where llama.cpp cannot be installed."""
        super().__init__([str(SERVER), str(install(cache).resolve())], program="node")

    def open(self, path: Path) -> dict[str, Any]:
        """Loads a GGUF file. Returns its metadata (nested at the dots), bos, eos, eot and context."""
        return self._ask("open", path=str(path))

    def tokenize(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """Ids of texts, without BOS; special: names of control tokens in a text become those tokens."""
        return self._ask("tokenize", texts=list(texts), special=special)

    def ends(self, ids: Sequence[int]) -> list[bool]:
        """Whether generation ends at these tokens."""
        return self._ask("ends", ids=list(ids))

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._ask("detokenize", ids=list(ids))

    def render(self, messages: Sequence[Any], *, add_generation_prompt: bool) -> str:
        """The text of a conversation by the file's chat template."""
        return self._ask("render", messages=list(messages), add_generation_prompt=add_generation_prompt)

    def probabilities(self, ids: Sequence[int]) -> np.ndarray:
        """ids (T,) → (T, V): the probabilities of the token that follows each position, with an fp32 cache."""
        return np.array(self._ask("probabilities", ids=list(ids)), dtype=np.float64)

    def _ask(self, verb: str, **given: Any) -> Any:
        answer = self.ask({"verb": verb, **given}, gone={"error": "it ended"})
        if "error" in answer:
            raise RuntimeError(f"llama.cpp refused {verb}: {answer['error']}")
        return answer["result"]
