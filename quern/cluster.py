"""Connects this process to a Ray cluster. What runs there is defined where it is used."""

from __future__ import annotations

import importlib
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Connects to a cluster at "auto" or HOST:PORT. Raises ImportError without Ray, ValueError without a cluster."""
    ray = ray_module()
    try:
        if address != "auto":  # Ray itself would wait longer
            host, _, port = address.rpartition(":")
            if not (host and port.isdecimal()) or "/" in address:
                raise ValueError("it is neither auto nor HOST:PORT")
            socket.create_connection((host, int(port)), timeout=SECONDS_TO_CONNECT).close()
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError) as error:
        raise ValueError(f"there is no Ray cluster at {address} ({error}): start it with `ray start --head`") from error


def cluster_cpus() -> int:
    """The CPUs of the connected cluster, at least 1."""
    return max(1, int(ray_module().cluster_resources().get("CPU", 0)))


@contextmanager
def actors(kind: type, count: int, what: str, arguments: tuple[Any, ...], **needs: Any) -> Iterator[list[Any]]:
    """Runs actors of a class on the connected cluster for the length of the block. Raises RuntimeError where it has no
    room for them, loses one, or one fails.

    what: for messages; arguments: of the class; needs: Ray's options of an actor.
    """
    ray = ray_module()
    started = [ray.remote(kind).options(**needs).remote(*arguments) for _ in range(count)]
    try:
        ray.get([one.__ray_ready__.remote() for one in started], timeout=SECONDS_TO_START)
        yield started
    except ray.exceptions.GetTimeoutError as error:
        room = f"the cluster has had no room for {what} for {SECONDS_TO_START} s"
        raise RuntimeError(f"{room}: give fewer --workers, or fewer --threads") from error
    except ray.exceptions.RayError as error:
        own = isinstance(error, ray.exceptions.RayTaskError)  # the actor's; others are the cluster's
        last_line = str(error).strip().splitlines()[-1]  # without the traceback of the other machine
        raise RuntimeError(("" if own else "the cluster has failed: ") + last_line) from error
    finally:
        for one in started:
            ray.kill(one)
