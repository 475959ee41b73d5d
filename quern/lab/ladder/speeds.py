"""The speeds of a study's ideas against the baseline, measured apart from the trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from quern.lab.arms import Arm
from quern.lab.axes.speed import measure_speed
from quern.lab.ladder.rungs import at_rung
from quern.lab.ladder.study import SPEEDS, Study
from quern.machine import Machine


def measure_missing(
    study: Study,
    arms: Mapping[str, Arm],
    ideas: Sequence[str],
    out: Path,
    machine: Machine,
    log: Callable[[str], None],
) -> None:
    """Measures each idea on each rung on which it has a finished trial and no speed.

    Args:
        study: Open.
        arms: By name: the recipe of each arm, not sized.
        ideas: Names of the ideas.
        out: The folder of tokenizers and token shards.
        machine: The machine, attention selected.
        log: Takes lines for the user.
    """
    for number, rung in sorted((int(number), rung) for number, rung in study.plan.rungs.items()):
        base = at_rung(arms[study.plan.base].recipe, rung)
        for idea in ideas:
            with study.claim(f"speed-{number}-{idea}") as mine:
                runs = study.runs(idea, number).values()
                if not mine or (idea, number) in study.speeds or all(run.bpb is None for run in runs):
                    continue
                try:
                    speed = measure_speed(base, at_rung(arms[idea].recipe, rung), out, machine)
                except (ValueError, RuntimeError) as error:
                    log(f"rung {number}, {idea}: no speed, {error}")
                    continue
                study.add(SPEEDS, {"recipe": idea, "rung": number, **asdict(speed)})
                log(f"rung {number}, {idea}: {speed}")
