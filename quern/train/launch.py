"""Several processes for one command: starts them with torch's elastic agent (torchrun), and joins them to a mesh.

`quern pretrain … --ranks 2` becomes the parent of the ranks. Each rank runs the same command, reads its rank from the
environment, and joins. An outcome that a restart would not change (done, stopped by a signal, diverged, refused) is
passed in a file, because the agent takes every exit code except 0 for a failure.

The parent forwards signals to its ranks and lets the agent run. The ranks of all machines stop after the same step and
exit with 0, so the agents end together. An agent that handles the signal itself leaves without telling the others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quern import compiler
from quern.kernels.attention.autotune import select_attention
from quern.machine import Machine
from quern.mesh import EVALUATING, Mesh, PeersLostError, alone, await_listener, connect, disconnect
from quern.process import environment, number_of, prompt_signals, set_child_env, waiting
from quern.process import to_stderr as _log
from quern.temporaries import plainly, scratch_folder, write_whole
from quern.train.guard import heeded
from quern.train.heartbeat import Heartbeat, exit_now
from quern.train.manifest import CheckpointError

RESULT, PARENT = "QUERN_RESULT", "QUERN_PARENT"
"""Variables: the file for the exit code of a machine's first rank, and the process id of the parent."""
TOGETHER_SECONDS = 1.0
"""Signals to the parent within this time count as one: the scheduler, the shell and a script may each send it."""
EXIT_SECONDS = 10.0
"""Seconds for which a machine whose ranks have ended waits for the other machines."""
MEET_SECONDS = 900
"""Seconds for which a machine waits for the others to start."""
CONNECT_SECONDS = 60.0
"""Seconds in which the ranks may connect, once all of them have arrived."""
USERS = (ValueError, OSError, ImportError, CheckpointError)
"""Before training, these errors are for the user to correct: one rank reports them, and nothing restarts."""


class Place(NamedTuple):
    """This process among the command's. ranks_here: those of this machine; restart: how often all were restarted."""

    rank: int
    ranks: int
    local_rank: int
    ranks_here: int
    restart: int

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def threads(self) -> int:
        """This rank's share of the cores that the command may use on this machine."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // self.ranks_here)


def place() -> Place:
    """Reads torchrun's variables; without them this is the only process."""
    ranks = number_of("WORLD_SIZE", 1)
    here = number_of("LOCAL_RANK", 0), number_of("LOCAL_WORLD_SIZE", ranks)
    return Place(number_of("RANK", 0), ranks, *here, number_of("TORCHELASTIC_RESTART_COUNT", 0))


# The parent -------------------------------------------------------------------------------------------------


def launch(
    arguments: Sequence[str],
    ranks: int,
    restarts: int,
    nodes: int = 1,
    rendezvous: str = "",
    stopped: str = "before training began",
) -> int:
    """Runs `quern` with these arguments on several processes, and waits for them.

    SIGTERM, SIGINT and SIGHUP make the ranks of every machine finish the step, save and exit; outside the training loop
    they end at once. A second SIGTERM or SIGINT kills them.

    Args:
        ranks: Processes on this machine.
        restarts: How often all ranks are restarted when one fails.
        nodes: Machines that run this command together.
        rendezvous: host:port of one of the machines, where they meet; unused for one machine.
        stopped: When a signal stopped ranks that left no outcome, for the message.

    Returns the command's exit code; 128 + the signal's number where a signal stopped ranks that left no outcome.
    """
    with scratch_folder() as folder:
        result = folder / "result.json"
        set_child_env(
            {
                RESULT: str(result),
                PARENT: str(os.getpid()),
                "OMP_NUM_THREADS": "1",
                "LOGLEVEL": "CRITICAL",  # for the agent: the ranks report failures in more detail
                "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",  # `_forwarding` handles the others
            }
        )
        agent = _agent(arguments, ranks, restarts, folder, nodes, rendezvous if nodes > 1 else "localhost:0")
        with _forwarding(agent) as received:
            failure = _supervise(agent, restarts, nodes)
        if result.exists():
            return json.loads(result.read_text(encoding="utf-8"))
        if received:
            failure = f"stopped by {received[0].name} {stopped}"
        _log(f"quern {arguments[0]}: {failure}")
        return 128 + received[0] if received else 1


def _agent(arguments: Sequence[str], ranks: int, restarts: int, folder: Path, nodes: int, rendezvous: str) -> Any:
    """Builds torch's elastic agent as torch.distributed.launcher does, with a shorter wait at the end."""
    # Imported late: these modules read the log level at import.
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.launcher.api import LaunchConfig

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # if it was imported before
    machines = f"the machines of --nodes {nodes} at {rendezvous}" if nodes > 1 else "torch, which starts the ranks"
    with waiting(machines, MEET_SECONDS):
        handler = _handler(nodes, rendezvous)
    meet = handler.next_rendezvous

    def next_rendezvous() -> Any:
        try:
            with waiting(machines, MEET_SECONDS):
                met = meet()
        except AssertionError as error:  # this machine is the first now, and has not made the store that it tells of
            raise RendezvousError(f"torch {torch.__version__} cannot replace rank 0's machine; 2.13 can") from error
        # torch tells its store's address at the first meeting alone: a machine in a lost one's place would not hear it.
        own = met.bootstrap_store_info
        assert own is not None  # of c10d
        told = RendezvousStoreInfo.build(met.rank, met.store, own.master_addr, own.master_port)
        return RendezvousInfo(met.store, met.rank, met.world_size, told)

    handler.next_rendezvous = next_rendezvous
    spec = WorkerSpec(
        role="quern",
        local_world_size=ranks,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        args=("-m", "quern.cli.main", *arguments),
        max_restarts=restarts,
        numa_options=LaunchConfig(nodes, nodes, ranks).numa_options,  # torch's default
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(folder)), exit_barrier_timeout=EXIT_SECONDS)


def _handler(nodes: int, rendezvous: str) -> Any:
    """Returns torch's handler of the meetings. Raises TimeoutError or ConnectionError where there is none to join."""
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    def join(is_host: bool) -> Any:
        limits = {"join_timeout": MEET_SECONDS, "is_host": is_host}
        return get_rendezvous_handler(RendezvousParameters("c10d", rendezvous, "quern", nodes, nodes, **limits))

    # torch waits for a minute, and does not know all addresses of this machine.
    is_host = await_listener(*parse_rendezvous_endpoint(rendezvous, 0), MEET_SECONDS, "the machine", own=True)
    try:
        if is_host:
            with contextlib.suppress(RendezvousConnectionError):  # another command here has taken the port since
                return join(is_host=True)
        return join(is_host=False)
    except RendezvousConnectionError as error:
        raise ConnectionError(f"what answers at {rendezvous} is not quern: give another port") from error


def _supervise(agent: Any, restarts: int, nodes: int) -> str:
    """Runs the agent to its end, and returns the failure to report if the ranks left no outcome."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousTimeoutError,
    )

    again = "start the command again on every machine, with --resume"
    try:
        result = agent.run()
    except SignalException as received:
        return f"ended by {received.sigval.name}"
    except RendezvousClosedError:
        return "another machine was asked to stop before training began, or has ended"
    except RendezvousTimeoutError:
        return f"not all of {nodes} machines arrived within {MEET_SECONDS / 60:.0f} minutes"
    except RendezvousConnectionError:
        return f"the machine of --rendezvous is lost: {again}"
    except (RendezvousError, torch.distributed.DistError) as error:
        reason, *_ = str(error).split("\n")
        return f"cannot reach the other machines ({reason}): {again}"
    finally:
        agent.get_worker_group().spec.rdzv_handler.shutdown()
    failures = sorted(result.failures.items()) if result else []
    ends = [f"; rank {rank} was ended by {one.signal_name()}" for rank, one in failures if one.exitcode < 0]
    return f"{f'given up after {restarts} restarts' if restarts else 'ended early'}{''.join(ends)}"


@contextmanager
def _forwarding(agent: Any) -> Iterator[list[signal.Signals]]:
    """Forwards signals to the agent's ranks, and yields the list of those that were forwarded."""
    # In a thread: a handler may interrupt the agent while it holds a lock of the rendezvous.
    received: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    forwarded: list[signal.Signals] = []
    before = {which: signal.signal(which, lambda number, _: received.put(signal.Signals(number))) for which in heeded()}
    threading.Thread(target=_forward, args=(agent, received, forwarded), name="signals", daemon=True).start()
    try:
        yield forwarded
    finally:
        for which, handler in before.items() if not forwarded else ():  # else the process is about to exit
            signal.signal(which, handler)


def _forward(agent: Any, received: queue.SimpleQueue[signal.Signals], forwarded: list[signal.Signals]) -> None:
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    forwarded.append(received.get())
    until = time.monotonic() + TOGETHER_SECONDS
    asked = _send(agent, signal.SIGTERM)
    with contextlib.suppress(RendezvousError):
        agent.get_worker_group().spec.rdzv_handler.set_closed()  # no machine restarts its ranks
    while True:
        asked |= _send(agent, signal.SIGTERM, asked)  # also to ranks that had just been starting
        with contextlib.suppress(queue.Empty):
            if received.get(timeout=0.2) != signal.SIGHUP and time.monotonic() > until:
                _send(agent, signal.SIGKILL)


def _send(agent: Any, which: signal.Signals, skipped: Set[int] = frozenset()) -> set[int]:
    """Sends a signal to the ranks of this machine, and returns their process ids."""
    pids = {worker.id for worker in agent.get_worker_group().workers if worker.id is not None} - skipped
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has exited
            os.kill(pid, which)
    return pids


# A rank -----------------------------------------------------------------------------------------------------


def finish(code: int) -> int:
    """Returns the exit code of a rank whose command ended by itself: under `launch` 0, and a file holds `code`."""
    if (path := environment().get(RESULT)) is None:
        return code
    if place().local_rank == 0:
        write_whole(Path(path), json.dumps(code))
    return 0


def agreed(machine: Machine, mesh: Mesh, log: Callable[[str], None]) -> Machine:
    """Returns the machine as all ranks use it: bf16 and the compiler only where every rank has chosen them. Ranks that
    differ would exchange numbers of other types, or their gradients in another order (parallel/zero3.py)."""
    chosen = mesh.world.gather_objects((machine.dtype == torch.bfloat16, machine.compile))
    narrow, compiled = (all(column) for column in zip(*chosen, strict=True))
    if machine.dtype == torch.bfloat16 and not narrow:
        log(f"rank {mesh.rank} computes in fp32, because another rank does")
        machine = replace(machine, dtype=torch.float32)
        machine = machine if machine.attention is None else select_attention(machine)  # it was picked for bf16
    if machine.compile and not compiled:
        log(f"rank {mesh.rank} runs eagerly, because another rank does")
        compiler.set_eager(True)
        machine = replace(machine, compile=False)
    return machine


@contextmanager
def joined(
    command: str, tp: int, detect: Callable[[int | None], Machine], threads: int | None, timeout: float, zero: int = 2
) -> Iterator[tuple[Machine, Mesh]]:
    """Yields this rank's machine and mesh.

    With several ranks nothing is raised: an error in the body is reported, with the rank and the step, and ends the
    process. So does the failure of a peer rank (train/heartbeat.py).

    command: begins every report; detect: takes the number of CPU threads; threads: number of threads of this rank; None
    shares the cores equally.
    """
    here = place()
    if here.ranks == 1:
        yield detect(threads), alone()
        return
    parent, given = os.getppid(), environment()
    if RESULT in given and Path(given[RESULT]).exists():  # this rank was started after the outcome was decided
        exit_now(0)
    if int(given.get(PARENT, parent)) != parent:  # its parent is gone
        exit_now(1)
    heartbeat = None

    def log(line: str) -> None:
        _log(f"{command}: {line}")

    def give_up() -> None:
        within = f"though all were there, within {CONNECT_SECONDS:.0f} s"
        log(f"rank {here.rank} could not connect to the others, {within}; all end")
        exit_now(1)

    timer = threading.Timer(CONNECT_SECONDS, give_up)
    timer.daemon = True
    with prompt_signals(dict.fromkeys((signal.SIGTERM, signal.SIGINT), _TerminatedError)):
        try:
            machine = detect(threads or here.threads)
            mesh = connect(tp, machine.device, here.rank, here.ranks, met=timer.start, zero=zero)
            timer.cancel()
            heartbeat = Heartbeat(mesh, timeout, log, parent)
            yield agreed(machine, mesh, log), mesh
            mesh.world.barrier()
            heartbeat.close()
            mesh.world.barrier()  # no rank's store is closed while another heartbeat uses it
            disconnect(mesh)
        except (SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            for which in (signal.SIGTERM, signal.SIGINT):
                signal.signal(which, signal.SIG_IGN)
            exit_now(_report(error, here, log, heartbeat))


def restarted(mesh: Mesh) -> bool:
    """Returns whether the ranks of any machine were restarted: then all ranks resume."""
    return any(mesh.world.gather_objects(place().restart > 0))


class _TerminatedError(BaseException):
    """A signal outside the training loop. The agent terminates the ranks that a failed rank left."""


def _report(error: BaseException, here: Place, log: Callable[[str], None], heartbeat: Heartbeat | None) -> int:
    """Reports an error, and returns the exit code. heartbeat: None before the ranks are connected."""
    lost, ended = heartbeat and isinstance(error, PeersLostError), isinstance(error, _TerminatedError)
    if heartbeat and (lost or ended) and heartbeat.report_peer_loss(str(error) if lost else ""):
        return finish(1)
    if ended and RESULT not in environment():  # else `launch` has sent the signal
        log(f"rank {here.rank} was ended by {signal.Signals(error.args[0]).name}")
        return 128 + error.args[0]
    if lost or ended:
        return 1
    if heartbeat is None:
        if isinstance(error, USERS):
            if here.local_rank == 0:
                log(plainly(error))
            return finish(1)
        log(f"rank {here.rank} failed while it joined the others: {type(error).__name__}: {error}")
        return 1
    step = heartbeat.mesh.progress.step
    if isinstance(error, USERS) and step is None:
        if here.main:
            heartbeat.report(plainly(error), final=True)
            log(plainly(error))
            return finish(1)
        if heartbeat.failure(wait_seconds=5) == (0, plainly(error), True):
            return finish(1)
    evaluates = heartbeat.mesh.progress.phase == EVALUATING
    at = f"in step {step + 1}" if step is not None else f"while {EVALUATING}" if evaluates else "before its first step"
    reason = f"rank {here.rank} failed {at}: {type(error).__name__}: {error}"
    with contextlib.suppress(RuntimeError):  # the store may be gone
        heartbeat.report(reason)
    if not isinstance(error, (*USERS, RuntimeError)) or environment().get("QUERN_TRACEBACK"):
        traceback.print_exception(error)
    log(f"{reason}; all end")
    return 1
