"""Connects this process to a Ray cluster. What runs there is defined where it is used."""

from __future__ import annotations

import importlib
import logging
import socket
from typing import Any

from quern.process import environment, set_child_env
from quern.validate import extra

SECONDS_TO_CONNECT = 10
SECONDS_TO_START = 120
"""How long actors may wait for room in the cluster."""
RAY_WAITS = {"RAY_NUM_REDIS_GET_RETRIES": "3", "RAY_py_gcs_connect_timeout_s": str(SECONDS_TO_CONNECT)}
"""Variables that Ray reads at its import. Without them it tries for a quarter of an hour to reach a lost cluster."""


def ray_module() -> Any:
    """Ray, imported when it is first needed. Raises ImportError with the command that installs it."""
    set_child_env({**RAY_WAITS, **environment()})
    with extra("ray", "a Ray cluster needs an extra package"):
        return importlib.import_module("ray")


def connect(address: str) -> None:
    """Connects this process to a cluster at "auto" or HOST:PORT. Raises ImportError without Ray, ValueError
    without it."""
    ray = ray_module()
    try:
        if address != "auto":  # Ray itself would wait longer
            host, _, port = address.rpartition(":")
            if not (host and port.isdecimal()) or "/" in address:
                raise ValueError("it is neither auto nor HOST:PORT")
            socket.create_connection((host, int(port)), timeout=SECONDS_TO_CONNECT).close()
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"there is no Ray cluster at {address} ({error}): start one with `ray start --head`, and give its address"
        ) from error


def cluster_cpus() -> int:
    """The CPUs of the connected cluster, at least 1."""
    return max(1, int(ray_module().cluster_resources().get("CPU", 0)))


def last_line(error: Exception) -> str:
    """The message of one of Ray's errors, without the traceback of the other machine."""
    return str(error).strip().splitlines()[-1]
