"""Decides which trials of a study come next, claims them, and trains them, until every idea is judged."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from quern.lab.arms import Arm, Order, Train
from quern.lab.ladder.rungs import at_rung
from quern.lab.ladder.study import TRIALS, Study, TrialRecord
from quern.lab.verdict import Finding, Judgement, Rules, judge
from quern.recipe import Recipe
from quern.records import strict

LOOKS = (3, 5, 8, 12, 16)
"""An idea is judged after so many pairs: they train in one process, which compiles once."""
TUNE_FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)
"""What the tuned field is multiplied by, for every arm."""
TUNE_SEEDS = (1_000, 1_001)
"""Seeds that no verdict uses."""
CURVE_SEEDS = 3
"""Seeds of the baseline on the rung above the highest one, which its loss over compute needs."""
EVALUATIONS = 2
"""Validations in a trial, for the curves."""
KEY = {"recipe", "seed"}
"""Fields of a record that the study decides."""
BLOCK = 3
"""Seeds of the baseline that one process trains."""
LEAST_MARGIN = 0.02
"""Bits per byte by which a baseline must be below the trigram that counts its tokens, and three standard errors."""
SETTLED = ("worse", "worse, small", "no difference", "fails")
"""Verdicts with which an idea does not go up."""
WAIT_SECONDS = 2.0
DIED = "ended with code"
"""In the message of `child.Child.answer` about a process that died."""


@dataclass(frozen=True)
class Job:
    """Trials of one arm at one rung, which one process trains.

    Args:
        arm: Its name.
        rung: Number of the rung.
        seeds: Of the trials that are missing.
        value: Of the tuned field, or None.
        block: Number of the block of `BLOCK` seeds, where an arm's seeds are trained by several processes.
    """

    arm: str
    rung: int
    seeds: tuple[int, ...]
    value: float | None = None
    block: int | None = None

    @property
    def claim(self) -> str:
        # A name that stays the same while its seeds are trained.
        part = "" if self.block is None else f"-{self.block}"
        return f"{self.rung}-{self.arm}{part}{'' if self.value is None else f'-{self.value:g}'}"


@dataclass(frozen=True)
class Options:
    """What a start asks for, which may differ between the starts of a study.

    Args:
        rungs: Numbers of the rungs, ascending.
        every: Whether ideas go up whatever their verdict.
        first_seed: Seed of the first pair.
        ideas: The ideas that this start works on.
    """

    rungs: Sequence[int]
    ideas: Sequence[str]
    every: bool = False
    first_seed: int = 0


def judged(study: Study, rung: int) -> Judgement:
    """The verdicts on all ideas of a study at a rung, at equal steps.

    An idea whose runs are those of the baseline, bit for bit, changes nothing, and says nothing of the noise of others.
    """
    plan, base = study.plan, _scores(study, study.plan.base, rung)
    rules = Rules(plan.delta, plan.most_pairs, plan.alpha)
    runs = {name: scores for name in study.ideas if (scores := _scores(study, name, rung))}
    same = {name for name, scores in runs.items() if all(base.get(seed, math.nan) == scores[seed] for seed in scores)}
    found = judge(base, {name: scores for name, scores in runs.items() if name not in same}, rules)
    equal = {
        name: Finding("no difference", len(runs[name]), 0, 0.0, 0.0, math.inf, (0.0, 0.0), math.nan) for name in same
    }
    return replace(found, findings=found.findings | equal)


def _scores(study: Study, arm: str, rung: int) -> dict[int, float | None]:
    """The scores of an arm's trials, by seed: None for one that diverged. A trial that ended in an error has none."""
    return {seed: one.bpb for seed, one in study.runs(arm, rung, chosen(study, arm)).items() if not one.error}


def chosen(study: Study, arm: str) -> float | None:
    """The best value of the tuned field for an arm, by its trials on the lowest rung; None without tuning."""
    if not study.plan.tune:
        return None
    lowest = min(map(int, study.plan.rungs))
    means: dict[float, float] = {}
    for (name, rung, value), trials in study.trials.items():
        scores = [trials[seed].bpb for seed in TUNE_SEEDS if seed in trials]
        if name == arm and rung == lowest and value is not None and len(scores) == len(TUNE_SEEDS):
            means[value] = statistics.fmean(8.0 if score is None else score for score in scores)
    return min(means, key=lambda value: means[value], default=None)


def wanted(study: Study, options: Options, values: Mapping[str, Sequence[float]]) -> list[Job]:
    """The jobs that the study lacks now. An empty list: all ideas of this start are judged."""
    plan, base, lowest = study.plan, study.plan.base, min(map(int, study.plan.rungs))
    if plan.tune:
        jobs = [
            Job(arm, lowest, missing, value)
            for arm in (base, *options.ideas)
            for value in values[arm]
            if (missing := tuple(seed for seed in TUNE_SEEDS if seed not in study.runs(arm, lowest, value)))
        ]
        if jobs:
            return jobs
    ideas = list(options.ideas)
    for rung in options.rungs:
        if jobs := _at_rung(study, options, rung, ideas):
            return jobs
        verdicts = judged(study, rung).findings
        if not options.every:  # an idea that cannot be trained at this rung goes up
            ideas = [name for name in ideas if name not in verdicts or verdicts[name].verdict not in SETTLED]
    above = max(options.rungs) + 1
    if str(above) in plan.rungs:
        return _baseline(study, options, above, CURVE_SEEDS)
    return []


def _at_rung(study: Study, options: Options, rung: int, ideas: Sequence[str]) -> list[Job]:
    plan = study.plan
    first = min(LOOKS[0], plan.most_pairs)
    if jobs := _baseline(study, options, rung, first):
        return jobs
    check_proxy(study, rung)
    verdicts = judged(study, rung).findings
    jobs, most = [], first
    for name in ideas:
        runs = study.runs(name, rung, chosen(study, name))
        if any(one.error for one in runs.values()):
            continue
        found = verdicts.get(name)
        pairs = len([seed for seed in runs if seed - options.first_seed < plan.most_pairs])
        if found is not None and pairs >= first and found.verdict != "undecided":
            most = max(most, pairs)
            continue
        goal = next((look for look in (*LOOKS, plan.most_pairs) if look > pairs), plan.most_pairs)
        goal = min(goal, plan.most_pairs)
        most = max(most, goal)
        if missing := tuple(seed for seed in _seeds(options, goal) if seed not in runs):
            jobs.append(Job(name, rung, missing, chosen(study, name)))
    # Twice the first look's seeds of the baseline: the further ones are compared with the others, an A/A floor.
    return [*_baseline(study, options, rung, max(most, 2 * first)), *jobs]


def _baseline(study: Study, options: Options, rung: int, count: int) -> list[Job]:
    value = chosen(study, study.plan.base)
    runs = study.runs(study.plan.base, rung, value)
    blocks: dict[int, list[int]] = {}
    for at, seed in enumerate(_seeds(options, count)):
        if seed not in runs:
            blocks.setdefault(at // BLOCK, []).append(seed)
    return [Job(study.plan.base, rung, tuple(seeds), value, block) for block, seeds in blocks.items()]


def _seeds(options: Options, count: int) -> range:
    return range(options.first_seed, options.first_seed + count)


class Worker:
    """Trains the jobs of a study, one after another, beside other workers.

    Args:
        study: Open.
        arms: By name: the recipe of each arm, not sized, with its file.
        train: Trains an arm's orders.
        about: The machine, for the records.
        log: Takes lines for the user.
    """

    def __init__(
        self, study: Study, arms: Mapping[str, Arm], train: Train, about: str, log: Callable[[str], None]
    ) -> None:
        self.study, self.arms, self.train, self.about, self.log = study, arms, train, about, log
        self.commit, self.changed = _commit()
        self.lost: set[tuple[str, int]] = set()

    def run(self, options: Options) -> None:
        """Works until nothing is wanted, beside other processes."""
        values = {name: tuned_values(self.study, arm.recipe) for name, arm in self.arms.items()}
        while jobs := self._left(wanted(self.study, options, values)):
            for job in jobs:
                with self.study.claim(job.claim) as mine:
                    if mine and job in wanted(self.study, options, values):
                        self._train(job)
                        break
            else:
                time.sleep(WAIT_SECONDS)  # other processes train all of them
                self.study.refresh()

    def _left(self, jobs: Sequence[Job]) -> list[Job]:
        return [job for job in jobs if (job.arm, job.rung) not in self.lost]

    def _train(self, job: Job) -> None:
        self._check_machine(job.rung)
        arm, rung = self.arms[job.arm], self.study.plan.rungs[str(job.rung)]
        base = TrialRecord(
            job.arm,
            job.rung,
            -1,
            job.value,
            commit=self.commit,
            changed=self.changed,
            machine=self.about,
            text=self.study.plan.text,
            numbers=self.study.plan.numbers[str(job.rung)],
            code=self.study.arms[job.arm].code,
        )
        try:
            recipe = at_rung(with_value(arm.recipe, self.study.plan.tune, job.value), rung)
            orders = [Order(None, *self.study.plan.seeds(seed), evaluations=EVALUATIONS) for seed in job.seeds]
            for seed, trial in zip(job.seeds, self.train(replace(arm, recipe=recipe), orders), strict=False):
                body = trial.to_json()
                found = {name: body[name] for name in TrialRecord.__dataclass_fields__.keys() & body.keys() - KEY}
                now = datetime.now(UTC).isoformat(timespec="seconds")
                self._keep(replace(base, seed=seed, time=now, **found))
        except (RuntimeError, ValueError) as error:
            if job.arm == self.study.plan.base:
                raise
            if DIED in str(error):  # killed, from outside or for its memory: the next start tries again
                self.lost.add((job.arm, job.rung))
                self.log(f"rung {job.rung}, {job.arm}: {error}")
                return
            self._keep(replace(base, seed=job.seeds[0], error=str(error)[:300]))

    def _check_machine(self, rung: int) -> None:
        """Raises ValueError if trials of the rung have another device, dtype or compilation: scores would differ."""
        runs = (one for (_, at, _), trials in self.study.trials.items() if at == rung for one in trials.values())
        before = next((one.machine for one in runs if one.machine), self.about)
        if before.partition(",")[0] != self.about.partition(",")[0]:
            raise ValueError(
                f"rung {rung} of the study {self.study.name} was trained on another machine ({before}), and this is "
                f"{self.about}: give the same --device, --dtype and --compile, or name another study with --study"
            )

    def _keep(self, trial: TrialRecord) -> None:
        defaults = asdict(TrialRecord("", -1, -1))
        body = {name: value for name, value in asdict(trial).items() if value != defaults[name]}
        self.study.add(TRIALS, strict(body))
        score = trial.error or ("diverged" if trial.bpb is None else f"{trial.bpb:.4f} bits per byte")
        value = "" if trial.value is None else f", {self.study.plan.tune} {trial.value:g}"
        self.log(f"rung {trial.rung}, {trial.recipe}{value}, seed {trial.seed}: {score}, {trial.seconds:,.0f} s")


def with_value(recipe: Recipe, field: str, value: float | None) -> Recipe:
    """The recipe with a value of its optimizer's field; unchanged for None."""
    return recipe if value is None else replace(recipe, optim=replace(recipe.optim, **{field: value}))


def tuned_values(study: Study, recipe: Recipe) -> list[float]:
    """The values of the tuned field that an arm tries."""
    own = getattr(recipe.optim, study.plan.tune) if study.plan.tune else None
    return [] if own is None else [round(factor * own, 10) for factor in TUNE_FACTORS]


def proxy_line(study: Study, rung: int) -> str:
    """The bits per byte of the n-grams that count the baseline's tokens at a rung, and the baseline's own."""
    known, scores = study.counted(rung), _finished(study, rung)
    told = f"unigram {known['1']:.3f}, bigram {known['2']:.3f}, trigram {known['3']:.3f} bits per byte"
    if not scores:
        return told
    spread = f" ± {statistics.stdev(scores):.4f} (SD)" if len(scores) > 1 else ""
    return f"{told}; {study.plan.base} {statistics.fmean(scores):.4f}{spread} over {len(scores)} seeds"


def check_proxy(study: Study, rung: int) -> None:
    """Compares the baseline with the trigram that counts the same tokens.

    Raises:
        ValueError: The baseline is not clearly below it, so verdicts on a rung of the ladder would mean nothing.
    """
    scores = _finished(study, rung)
    error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
    most = study.counted(rung)["3"] - max(LEAST_MARGIN, 3 * error)
    if study.plan.ladder and scores and statistics.fmean(scores) > most:
        raise ValueError(
            f"rung {rung}: {proxy_line(study, rung)}: the baseline is not clearly below the trigram, so the rung is no "
            "proxy: give more text, or a text that it learns faster"
        )


def _finished(study: Study, rung: int) -> list[float]:
    return [one for one in _scores(study, study.plan.base, rung).values() if one is not None]


def _commit() -> tuple[str | None, tuple[str, ...]]:
    """The commit of quern's code, and the files that differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""

    changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
    return git("rev-parse", "--short=12", "HEAD") or None, tuple(line[3:] for line in changed[:20])
