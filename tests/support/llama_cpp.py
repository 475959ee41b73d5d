"""llama.cpp in a child process, the oracle of GGUF export: loads a file, gives ids, probabilities and chat prompts.

It is the prebuilt binary of the npm package node-llama-cpp, 85 MB; npm installs it in about 10 s.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.line_server import LineServer
from tests.support.npm import installed

VERSION = "3.22.1"
PACKAGES = (f"node-llama-cpp@{VERSION}", f"@node-llama-cpp/linux-x64@{VERSION}")
SERVER = Path(__file__).with_suffix(".mjs")


class LlamaCpp(LineServer):
    """A running llama.cpp; `open` chooses the file that the other methods use."""

    def __init__(self, cache: Path) -> None:
        super().__init__([str(SERVER), str(installed(cache, *PACKAGES).resolve())], program="node")

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
