"""The pool of workers, and the choice of the tier."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Self

from quern.generate.sandbox.program import Limits, Outcome, Program, SandboxError
from quern.generate.sandbox.tiers import HOW, TIERS, check_machine
from quern.generate.sandbox.worker import Worker
from quern.ranges import Few, refuse_outside


class Sandbox:
    """Runs untrusted Python programs, each in processes of its own that share nothing with another program.

    A context manager: leaving it ends all processes. Programs have Python's standard library, no network, no files but
    Python's own, no environment, and no other process; docs/sandbox.md has the details.

    Args:
        workers: Number of programs that run at the same time.
        limits: Limits of each program.
        tier: "bubblewrap" or "landlock"; None takes the first of them that works on this machine.

    Raises:
        SandboxError: No tier works. The message says why, and what to install.
        ValueError: An unknown tier, or a number of workers outside its range.
    """

    def __init__(self, workers: int = 2, limits: Limits | None = None, tier: str | None = None) -> None:
        refuse_outside(Few, workers, "workers")
        if tier is not None and tier not in TIERS:
            raise ValueError(f"no tier {tier!r}: the tiers are {', '.join(TIERS)}")
        self.limits = limits or Limits()
        # A guest dies with the thread that starts it, and these threads live as long as the sandbox.
        self._threads = ThreadPoolExecutor(workers, "sandbox")
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        self._workers: list[Worker] = []
        try:
            check_machine()
            self.tier = self._first_that_works([tier] if tier else list(TIERS))
            for worker in self._threads.map(lambda _: Worker(self.tier, TIERS[self.tier]), range(workers - 1)):
                self._add(worker)
        except BaseException:
            self.close()
            raise

    def _first_that_works(self, tiers: list[str]) -> str:
        reasons = []
        for tier in tiers:
            try:
                self._add(self._threads.submit(Worker, tier, TIERS[tier]).result())
                return tier
            except SandboxError as error:
                reasons.append(f"{tier}: {error}")
        raise SandboxError(f"no sandbox works on this machine ({'; '.join(reasons)}): {HOW}")

    def _add(self, worker: Worker) -> None:
        self._workers.append(worker)
        self._idle.put(worker)

    def run(self, programs: Iterable[str | Program]) -> list[Outcome]:
        """Runs programs and returns their outcomes in the same order. A string is a `Program` without a check.

        Raises:
            SandboxError: The sandbox failed, which no program can bring about.
        """
        return list(self._threads.map(self._run_one, programs))

    def _run_one(self, program: str | Program) -> Outcome:
        worker = self._idle.get()
        try:
            return worker.run(Program(program) if isinstance(program, str) else program, self.limits)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends all processes."""
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
