"""Law: a run that is killed, anywhere and as often as one likes, and resumed = the run that nobody touched.

Real commands (`quern pretrain`, `quern sft`, `quern rl`, `quern grug train`) in real processes that die by SIGKILL,
some in the middle of a save, some while resuming. Bit for bit: every logged line but for what a clock says, and every
tensor, counter and file name of what is left. Over more than two epochs, so that some runs resume past one, some twice
within one.
"""

import json
import random
import signal
from collections.abc import Sequence

import pytest

from quern.records import read_events, read_metrics
from quern.train.guard import EXIT_STOPPED
from tests.laws.table import Law
from tests.support.run_bench import GRUG, PRETRAIN, RL, SFT, Bench, differences

# Kills ------------------------------------------------------------------------------------------------------


def killed_and_resumed(
    bench: Bench, command: Sequence[str], dtype: str, chains: int, kills: int, seed: int
) -> tuple[list[str], list[str]]:
    """Runs `chains` runs, each killed `kills` times; returns the differences and where each death was.

    The first death of each chain is drawn from its own stretch of the run, so that all of it is covered, its
    first events and its last ones too, every second one inside a save; the next are in any part, also while resuming.
    """
    rng = random.Random(seed)
    reference, events = bench.reference(command, dtype)
    found, places = [], []
    for chain in range(chains):
        name = bench.fresh(command, dtype)
        left = dict(events)
        for kill in range(kills):
            part = ("train", "save")[chain % 2] if kill == 0 else ("save", "train", "resume")[(chain + kill) % 3]
            stretch = (chain + rng.random()) / chains if kill == 0 else rng.random()
            number = 1 + int(stretch * max(1, left[part] - 1))
            resume = ["--resume"] if kill else []
            answer = bench.run([*command, *resume], name, dtype, kill=[part, number])
            if answer["status"] == 0:
                break  # it came to its end before that event
            places.append(answer["place"])
            if part != "resume":
                # What it did not come to; it does again what it did since its last save, so more than this is left.
                share = 1 - number / left[part]
                left |= {kind: max(1, int(left[kind] * share)) for kind in ("train", "save")}
        bench.run([*command, "--resume"], name, dtype)
        found += [f"{name}: {difference}" for difference in differences(bench.stage(name, command), reference)]
    return found, places


FEW = [(PRETRAIN, "fp32", 2, 2), (PRETRAIN, "bf16", 1, 1), (SFT, "fp32", 1, 1), (RL, "fp32", 1, 1)]
FEW += [(GRUG, "fp32", 2, 2)]
MANY = [(PRETRAIN, "fp32", 40, 3), (PRETRAIN, "bf16", 20, 3), (SFT, "fp32", 20, 3), (RL, "fp32", 20, 3)]
MANY += [(GRUG, "fp32", 25, 4)]


@pytest.mark.parametrize(
    ("command", "dtype", "chains", "kills"),
    [*FEW, *(pytest.param(*row, marks=pytest.mark.campaign) for row in MANY)],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_killed_and_resumed_is_uninterrupted(
    command: Sequence[str], dtype: str, chains: int, kills: int, bench: Bench, law: Law
) -> None:
    differing, places = killed_and_resumed(bench, command, dtype, chains, kills, seed=chains)
    name = f"resumed = uninterrupted: {command[0]}, {dtype}, killed at seeded points, some in a save"
    law(name, differing)
    many = chains > 2  # of these, some come to their end before their last kill
    assert len(places) >= (2.5 * chains if many else chains * kills), places
    assert sum(place.startswith("save") for place in places) >= (chains if many else chains // 2), places


def test_the_runs_go_on_past_their_second_epoch(bench: Bench) -> None:
    """Else the law would say nothing of it."""
    stage, _ = bench.reference(PRETRAIN, "fp32")
    facts = json.loads((stage.parent / "run.json").read_text(encoding="utf-8"))
    assert read_metrics(stage)[-1]["tokens"] > 2 * facts["data"]["train"]["tokens"]
    events = read_events(bench.reference(SFT, "fp32")[0])
    assert 2 * next(event for event in events if event["kind"] == "data")["rows"] < 19 * 4


@pytest.mark.parametrize(
    ("command", "again"),
    [
        (PRETRAIN, "pretrain --resume --run {} --no-comp"),
        (RL, "rl --resume --run {} --no-comp"),
        (GRUG, f"{' '.join(GRUG)} --resume --out out --run {{}} --dtype fp32`"),
    ],
    ids=["pretrain", "rl", "grug"],
)
def test_killed_and_then_stopped_by_a_signal(command: Sequence[str], again: str, bench: Bench, law: Law) -> None:
    """It dies; its resumption gets SIGTERM in a step, saves and exits with 75; the resumption of that ends the run."""
    (reference, events), name = bench.reference(command, "fp32"), bench.fresh(command, "fp32")
    bench.run(command, name, "fp32", kill=["train", int(0.5 * events["train"])])
    known, resume = len(bench.log()), [*command, "--resume"]
    stop = ["train", int(0.1 * events["train"])]
    assert bench.run(resume, name, "fp32", kill=stop, signal=signal.SIGTERM)["status"] == EXIT_STOPPED
    assert f"as asked, and saved: continue with `quern {again.format(name)}" in bench.log()[known:]
    bench.run(resume, name, "fp32")
    # The step it was stopped at was saved as well, so another one may be kept.
    differing = differences(bench.stage(name, command), reference, ignored="kept")
    law("resumed = uninterrupted: killed, then stopped by SIGTERM", differing)


def test_reinforcement_learning_from_another_run_keeps_its_first_model(bench: Bench) -> None:
    """Its divergence is measured from that model, also after a resume and without the other run."""
    (reference, events), other = bench.reference(RL, "fp32"), bench.copied(RL, "fp32")
    command, begun = [*RL, "--train.keep", "1"], f"{other}-begun"
    bench.run([*command, "--from", other], begun, "fp32", kill=["train", int(0.8 * events["train"])])
    (reference.parent.parent / other).rename(reference.parent.parent / f"{other}-away")
    bench.run([*command, "--resume"], begun, "fp32")
    found = [line["val_kl"] for line in read_metrics(bench.stage(begun, RL)) if "val_kl" in line]
    assert len(found) >= 3 and min(found) >= 0 and max(found) > 0
