"""What rank 0 does first may take longer than any collective waits, and its end is noticed.

Real commands on two ranks over gloo, whose collectives have a timeout of 4 seconds while they set up.
"""

import signal
from typing import Any

from quern.train import manifest
from tests.parallel.test_faults import PRETRAIN, SHORT, lines_with
from tests.support.faulty_ranks import FaultyRanks

RECIPE = """
import functools, os, signal, time
from dataclasses import replace
from datetime import timedelta
from quern.recipes.gpt import RECIPE as BASELINE
from quern.stages import pretrain
from quern.train import launch

launch.connect = functools.partial(launch.connect, timeout=timedelta(seconds=4))
prepare = pretrain.prepare

def planted(*arguments, **options):
    print("prepared by rank", os.environ["RANK"], flush=True)
    if os.environ["RANK"] == "0":
        {body}
    return prepare(*arguments, **options)

pretrain.prepare = planted
RECIPE = replace(BASELINE, name="planted")
"""


def pretrain(faulty_server: FaultyRanks, run: str, body: str) -> dict[str, Any]:
    path = faulty_server.folder / f"{run}.py"
    path.write_text(RECIPE.format(body=body), encoding="utf-8")
    found = faulty_server(["pretrain", str(path), *PRETRAIN[1:], *SHORT, "--run", run, "--timeout", "4"])
    assert len(lines_with("prepared by rank 0", found["said"])) == 1
    assert len(lines_with("prepared by rank 1", found["said"])) == (run == "long"), found["said"]
    return found


def test_a_body_that_takes_longer_than_the_collectives_wait(faulty_server: FaultyRanks) -> None:
    found = pretrain(faulty_server, "long", "time.sleep(6)")
    assert found["exits"] == [[0, 0]] and found["result"] == 0, found
    assert manifest.steps(faulty_server.folder / "out/runs/long/pretrain/checkpoints")


def test_rank_0_is_stopped_or_its_machine_is_gone(faulty_server: FaultyRanks) -> None:
    found = pretrain(faulty_server, "stopped", "os.kill(os.getpid(), signal.SIGSTOP)")
    assert found["exits"] == [[-signal.SIGKILL, 1]] and found["result"] is None, found
    (line,) = lines_with("quern pretrain:", found["said"])
    assert line.startswith("quern pretrain: rank 0 is gone or stopped, last seen setting up; rank 1 is ")
