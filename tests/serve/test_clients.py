"""Programs that speak OpenAI's API, as their users call them: the calls in clients/ against a real server.

A campaign: pip and npm install the programs once into pytest's cache (0.5 GB, some minutes). Where they cannot, the
tests are skipped. docs/serving.md has the figures of the last run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quern.generate.engine import Engine
from quern.generate.reply import STOP_TOKENS, Generation
from quern.serve.server import create_app
from tests.support.http_server import running
from tests.support.npm import installed
from tests.support.toy_engine import toy_engine

CALLS = Path(__file__).parent / "clients"
PYTHON = ("litellm", "langchain-openai", "instructor", "pydantic-ai", "llm")
NPM = ("openai@6", "ai@6", "@ai-sdk/openai@3", "@ai-sdk/openai-compatible@2", "zod@4")
JAVASCRIPT = ("openai", "ai")
INSTALL_SECONDS, CALL_SECONDS = 900, 240


class Talkative(Engine):
    """Ends its texts by their length and calls no tool of itself: programs take an empty answer for a failure."""

    def submit(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 256, **more: Any) -> Generation:
        ends = {self.tokenizer.special(name): -100.0 for name in (*STOP_TOKENS, "<|tool_start|>")}
        more["bias"] = ends | more.get("bias", {})
        return super().submit(prompts, max_tokens=min(max_tokens, 200), **more)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    toy = toy_engine(context=4096)
    with running(create_app({"toy": Talkative(toy.model, toy.tokenizer, toy.machine)})) as base:
        yield f"{base}/v1"


def python_with(folder: Path, packages: Sequence[str]) -> Path:
    """A folder with a virtual environment that has the packages, made unless it is there; skips where pip cannot."""
    if not (folder / "installed").exists():
        for command in ([sys.executable, "-m", "venv", "--clear", folder], [folder / "bin/pip", "install", *packages]):
            done = subprocess.run(command, capture_output=True, timeout=INSTALL_SECONDS)
            if done.returncode:
                pytest.skip(f"{command[:3]} failed: {done.stderr.decode(errors='replace')[-300:]}")
        (folder / "installed").touch()
    return folder


@pytest.mark.campaign
@pytest.mark.timeout(INSTALL_SECONDS + CALL_SECONDS)
@pytest.mark.parametrize("program", [*PYTHON, *(f"{name} (npm)" for name in JAVASCRIPT)])
def test_every_call_of_a_program_behaves_as_expected(url: str, program: str, pytestconfig: pytest.Config) -> None:
    name, cache = program.removesuffix(" (npm)"), pytestconfig.cache.mkdir("clients")
    if name == program:
        packages = ["pydantic-ai-slim[openai]" if one == "pydantic-ai" else one for one in PYTHON]
        folder = python_with(cache / "python", packages)
        command = [folder / "bin" / "python", CALLS / "calls.py", name]
    else:
        folder = installed(cache, *NPM)
        command = ["node", CALLS / "calls.mjs", name]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HOME": str(folder)}
    done = subprocess.run([*command, url, "toy"], cwd=folder, env=env, capture_output=True, timeout=CALL_SECONDS)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    print(f"{program}: {list(results.values()).count('')} of {len(results)} calls")
    assert {call: failed for call, failed in results.items() if failed} == {} and len(results) >= 5
