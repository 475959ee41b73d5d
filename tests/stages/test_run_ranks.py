"""Stages on two ranks over gloo, from nothing and after a fault: models, scores and report of one process. What rank 0
does first may take longer than any collective waits, and its end is noticed. Metrics in the files of TensorBoard and
Weights & Biases, both real and offline, are read back without quern."""

import signal
import struct
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quern.records import StageFolder, TensorBoardTracker, find_trackers, read_lines, read_metrics
from quern.runs.run_dir import RunDir
from quern.stages.session import Stage
from quern.train import manifest
from tests.parallel.test_faults import PRETRAIN, SHORT, lines_with
from tests.stages.test_run_all import STAGES, TOY
from tests.support.faulty_ranks import FaultyRanks

PRETRAIN_STEPS, SFT_STEPS = 8, 6
CALM = ("--optim.lr-scale", "0.015625")
"""Rates at which the order of the ranks' sums changes the scores by less than the bar."""
ALIKE = 1e-4
"""Relative, of losses after up to 14 updates. The laws bound an update by 1e-5; AdamW normalises gradients that are
near zero, so rounding errors can grow from one update to the next. Other batches change the last losses by 6e-3."""
RECIPE = """
from dataclasses import replace
from quern.recipes.gpt import RECIPE as BASELINE
from quern.stages import sft

def planted(*arguments, **options):
    raise ValueError("planted")

sft.ready_model = planted
RECIPE = replace(BASELINE, name="planted")
"""
OFFLINE = """
import os
from quern.recipes.gpt import RECIPE

os.environ |= {{"WANDB_MODE": "offline", "HOME": {home!r}}}  # wandb keeps its own logs in the home folder
"""
TRACKERS = ("tensorboard", "wandb")
TRACKED = all(map(find_spec, TRACKERS))
needs_trackers = pytest.mark.skipif(not TRACKED, reason="needs tensorboard and wandb")
REWARD = """
from quern.eval.task import question
from quern.rl.environment import Environment

ENVIRONMENT = Environment("mine", lambda seed: question(seed, ""), lambda item, reply: sum(map(ord, reply)) % 100 / 100)
"""
RL = """--rl.kl 0.1 --rl.steps 2 --rl.groups 3 --rl.samples 3 --rl.max-tokens 6
 --rl.val-questions 2 --rl.val-samples 2 --no-compile --dtype fp32 --threads 1""".split()


Cold = tuple[Path, list[dict[str, Any]]]


def request(folder: Path, name: str, *arguments: str, **how: Any) -> dict[str, Any]:
    command = ["run", *arguments, *TOY, *CALM, "--run", name, "--out", str(folder / name)]
    return {"arguments": command, **how}


@pytest.fixture(scope="module")
def cold(faulty_server: FaultyRanks, tmp_path_factory: pytest.TempPathFactory) -> Cold:
    """A folder with the runs of one process, of two replicas, of which one dies while they fine-tune, and of two
    shards; and the answers to the last two, and to a command whose fine-tuning fails by an error of the user."""
    folder = tmp_path_factory.mktemp("cold")
    (folder / "planted.py").write_text(RECIPE, encoding="utf-8")
    (folder / "offline.py").write_text(OFFLINE.format(home=str(folder)), encoding="utf-8")
    tracked = [str(folder / "offline.py"), "--track", *TRACKERS] if TRACKED else []
    killed = {"faults": [{"kind": "kill", "rank": 1, "step": PRETRAIN_STEPS + 5}], "restarts": 1}
    requests = [
        request(folder, "alone", ranks=1),
        request(folder, "replicas", **killed),
        request(folder, "shards", *tracked, "--tp", "2"),
        request(folder, "refused", str(folder / "planted.py"), restarts=1),
    ]
    alone, *others = faulty_server.together(requests)
    assert alone["result"] == 0, alone["said"]
    return folder, others


def scores(folder: Path, name: str) -> list[dict[str, Any]]:
    return read_lines(folder / name / "runs" / name / "evaluate.jsonl")


def titles(run: Path) -> list[str]:
    text = (run / "report.md").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("## ")]


@pytest.mark.parametrize("name", ["replicas", "shards"])
def test_two_ranks_leave_what_one_process_leaves(cold: Cold, name: str) -> None:
    folder, _ = cold
    runs = [folder / each / "runs" / each for each in ("alone", name)]
    left = [{p.relative_to(run) for p in run.rglob("*") if p.suffix != ".safetensors"} for run in runs]
    files = [{str(p) for p in some if not {*TRACKERS, "recipe_source.py"} & {*p.parts}} for some in left]
    assert files[0] == files[1]
    assert files[0] >= {"report.html", "report.md", "evaluate.jsonl", "answers/sft/tinyworld/sums.answers.jsonl"}
    for stage, steps in (("pretrain", PRETRAIN_STEPS), ("sft", SFT_STEPS)):
        one, two = (read_metrics(run / stage) for run in runs)
        assert [line["step"] for line in one] == [line["step"] for line in two] and one[-1]["step"] == steps
        for theirs, ours in zip(one, two, strict=True):
            for field in {"loss", "val_loss"} & theirs.keys():
                assert ours[field] == pytest.approx(theirs[field], rel=ALIKE)
    for theirs, ours in zip(scores(folder, "alone"), scores(folder, name), strict=True):
        assert ours["value"] == pytest.approx(theirs["value"], rel=ALIKE)
        assert ours | {"value": 0} == theirs | {"value": 0}
    assert titles(runs[0]) == titles(runs[1])


def test_each_step_is_said_once_also_where_a_rank_dies_or_fine_tuning_fails(cold: Cold) -> None:
    """The killed run goes on within fine-tuning. An error of the user ends all ranks, also after pretraining."""
    folder, (killed, shards, refused) = cold
    for found, times in ((killed, 2), (shards, 1)):
        assert found["exits"][times - 1 :] == [[0, 0]] and found["result"] == 0, found["said"]
        for line, count in {"tokens: train": 1, "fine-tuned on": 1, "evaluating: sft": 1, "report: ": 2}.items():
            assert len(lines_with(line, found["said"])) == count, found["said"]
    assert len(lines_with("resumed at step", killed["said"])) == 1, killed["said"]
    assert lines_with("pretraining: finished already", killed["said"]), killed["said"]
    assert refused["exits"] == [[0, 0]] and refused["result"] == 1, refused["said"]
    assert lines_with("quern run:", refused["said"]) == ["quern run: planted"]
    assert manifest.steps(folder / "refused/runs/refused/pretrain/checkpoints")[-1] == PRETRAIN_STEPS


def test_ranks_that_were_started_with_other_flags_are_refused(faulty_server: FaultyRanks) -> None:
    file = faulty_server.folder / "apart.py"
    file.write_text(
        "import os\nfrom dataclasses import replace\nfrom quern.recipes.gpt import RECIPE as OTHER\n"
        'scale = 0.5 ** int(os.environ.get("RANK", 0))\n'
        'RECIPE = replace(OTHER, name="apart", optim=replace(OTHER.optim, x0_lr=scale))\n',
        encoding="utf-8",
    )
    found = faulty_server([PRETRAIN[0], str(file), *PRETRAIN[1:], *SHORT, "--run", "apart"])
    told = "quern pretrain: rank 1 has another --optim.x0-lr than rank 0: start all with the same flags"
    assert found["result"] == 1 and lines_with("quern pretrain:", found["said"]) == [told]


def test_ranks_may_have_their_files_in_other_folders(tmp_path: Path) -> None:
    told = list[dict[str, Any]]()
    mesh: Any = SimpleNamespace(world=SimpleNamespace(gather_objects=lambda own: told.append(own) or told))
    stage = Stage(stage="sft", run_dir=RunDir(tmp_path, "r"), mesh=mesh)

    def start(folder: str, first: str = "x") -> None:
        talks = [{"source": f"{folder}/chat.jsonl", "repeats": 2}]
        data, rewards = f"{folder}/{first}.txt\n{folder}/y.txt", [f"{folder}/{first}.py"]
        stage.require_alike({"data": data, "conversations": talks, "rl": {"rewards": rewards}})

    start("/a")
    start("/b")
    with pytest.raises(ValueError, match="rank 2 has another --data, --rl.rewards than rank 0"):
        start("/c", first="z")


def test_shards_practise_as_one_process(cold: Cold, faulty_server: FaultyRanks) -> None:
    """Reinforcement learning of the same model: the replies, and what is learned of them."""
    out = cold[0] / "alone"
    (mine := out / "mine.py").write_text(REWARD, encoding="utf-8")
    counting = "--rl.rewards", "counting"
    runs = {
        "practised": counting,
        "practised-in-shards": (*counting, "--tp", "2"),
        "practised-apart": ("--rl.rewards", str(mine), "--train.log-every", "1"),
    }
    practise = ["rl", "--from", "alone", "--out", str(out), *RL, "--run"]
    requests = [{"arguments": [*practise, run, *flags], "ranks": 2 if flags[2:] else 1} for run, flags in runs.items()]
    found = faulty_server.together(requests)
    assert [one["result"] for one in found] == [0, 0, 0], [one["said"] for one in found]
    one, two, apart = (read_metrics(out / "runs" / run / "rl") for run in runs)
    reward = next(line["reward"] for line in reversed(apart) if "reward" in line)
    assert f"2 of 2 steps, reward {reward:.3f}" in found[2]["said"], "the replies of all ranks count"
    for theirs, ours in zip(one, two, strict=True):
        for field in {"loss", "entropy", "reply_tokens", "val_kl"} & theirs.keys():
            assert ours[field] == pytest.approx(theirs[field], rel=ALIKE, abs=1e-6)


FIRST = """
import functools, os, signal, time
from dataclasses import replace
from datetime import timedelta
from quern.recipes.gpt import RECIPE as BASELINE
from quern.stages import session
from quern.train import launch

launch.connect = functools.partial(launch.connect, timeout=timedelta(seconds=4))
prepare = session.prepare

def planted(*arguments, **options):
    print("prepared by rank", os.environ["RANK"], flush=True)
    if os.environ["RANK"] == "0":
        {body}
    return prepare(*arguments, **options)

session.prepare = planted
RECIPE = replace(BASELINE, name="planted")
"""


def test_rank_0_takes_longer_than_the_collectives_wait_or_is_stopped(faulty_server: FaultyRanks) -> None:
    """Both runs wait at the same time."""
    requests = []
    for run, body in (("long", "time.sleep(6)"), ("stopped", "os.kill(os.getpid(), signal.SIGSTOP)")):
        path = faulty_server.folder / f"{run}.py"
        path.write_text(FIRST.format(body=body), encoding="utf-8")
        arguments = ["pretrain", str(path), *PRETRAIN[1:], *SHORT, "--run", run, "--timeout", "4"]
        requests.append({"arguments": arguments})
    long, stopped = faulty_server.together(requests)
    for found, second in ((long, 1), (stopped, 0)):
        counts = [len(lines_with(f"prepared by rank {rank}", found["said"])) for rank in range(2)]
        assert counts == [1, second], found["said"]
    assert long["exits"] == [[0, 0]] and long["result"] == 0, long
    assert manifest.steps(faulty_server.folder / "out/runs/long/pretrain/checkpoints")
    assert stopped["exits"] == [[-signal.SIGKILL, 1]] and stopped["result"] is None, stopped
    (line,) = lines_with("quern pretrain:", stopped["said"])
    assert line.startswith("quern pretrain: rank 0 is gone or stopped, last seen setting up; rank 1 is ")


# Trackers ------------------------------------------------------------------------------------------------------------

Numbers = dict[tuple[str, int], float]
BLOCK, HEADER = 32_768, 7


def of_quern(stage: Path) -> Numbers:
    lines = read_metrics(stage)
    return {(name, line["step"]): value for line in lines for name, value in line.items() if name != "step"}


def of_tensorboard(stage: Path) -> list[tuple[tuple[str, int], float]]:
    from tensorboard.backend.event_processing import event_accumulator as events

    read = events.EventAccumulator(str(stage / "tensorboard"), size_guidance={events.SCALARS: 0}).Reload()
    return [((tag, one.step), one.value) for tag in read.Tags()["scalars"] for one in read.Scalars(tag)]


def of_wandb(stage: Path) -> tuple[Numbers, list[Any]]:
    """The history in the file of a wandb run, and the runs' own records."""
    proto: Any = import_module("wandb.proto.wandb_internal_pb2")
    (path,) = stage.glob("wandb/offline-run-*/*.wandb")
    found: Numbers = {}
    runs = []
    for body in records_of(path.read_bytes()):
        record = proto.Record.FromString(body)
        items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        found |= {(name, int(items["_step"])): float(value) for name, value in items.items() if name[0] != "_"}
        runs += [record.run] if record.HasField("run") else []
    return found, runs


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format: blocks of chunks with checksum, length and type (1 whole, 2 to 4 parts)."""
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):
            yield parts
            parts = b""


@needs_trackers
@pytest.mark.parametrize("stage", STAGES)
def test_both_trackers_have_every_number_of_a_stage(cold: Cold, stage: str) -> None:
    folder = cold[0] / "shards/runs/shards" / stage
    numbers = of_quern(folder)
    assert {("loss", 6), ("val_loss", 6), ("lr_multiplier", 6)} <= numbers.keys()
    assert dict(of_tensorboard(folder)) == {key: pytest.approx(value, rel=1e-6) for key, value in numbers.items()}
    found, (begun,) = of_wandb(folder)
    assert found == numbers
    assert (begun.project, begun.run_group, begun.job_type) == ("quern", "shards", stage)
    assert begun.run_id == (folder / "wandb/id").read_text(encoding="utf-8")


@needs_trackers
def test_the_lines_of_a_resumed_stage_are_there_once(tmp_path: Path) -> None:
    """The stage dies after step 6, and goes on from its checkpoint of step 3."""
    lost, kept = 1.0, 2.0
    for first, last, loss in ((1, 6, lost), (4, 8, kept)):
        trackers = [make(tmp_path, {}) for make in find_trackers(["tensorboard"])]
        assert isinstance(trackers[0], TensorBoardTracker)
        with StageFolder(tmp_path, trackers) as folder:
            folder.rewind(first - 1)
            for step in range(first, last + 1):
                folder.metric(step=step, loss=loss)
    found = of_tensorboard(tmp_path)
    assert found == [(("loss", step), lost if step < 4 else kept) for step in range(1, 9)]
    assert dict(found) == of_quern(tmp_path)
