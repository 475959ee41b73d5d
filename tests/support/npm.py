"""Packages of npm, each set installed once into a folder of pytest's cache.

They are what the suite fetches from another machine: llama.cpp, axe-core, and in a campaign the clients of
tests/serve/test_clients.py. npm is a child process, which the guard of tests/conftest.py does not reach.
"""

import contextlib
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

INSTALL_SECONDS = 150


def installed(folder: Path, *packages: str) -> Path:
    """The folder of `folder` that has the packages in node_modules. Skips the test where npm is missing or cannot
    install them, or they need a newer Node.js."""
    place, temporary = folder / packages[0].replace("/", "-"), folder / f".tmp-{uuid.uuid4().hex}"
    if place.exists():
        return place
    if shutil.which("npm") is None:
        pytest.skip(f"needs npm, which installs {packages[0]}")
    command = ["npm", "install", "--prefix", str(temporary), "--ignore-scripts", "--no-audit", "--no-fund"]
    command += ["--omit=optional", "--engine-strict", "--loglevel=error", "--fetch-retries=1", *packages]
    try:
        subprocess.run(command, check=True, capture_output=True, encoding="utf-8", timeout=INSTALL_SECONDS)
        with contextlib.suppress(OSError):  # another process was faster
            temporary.rename(place)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"npm could not install {packages[0]}: {str(error.stderr or error)[:300]}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return place
