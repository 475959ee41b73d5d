"""Decides which trials of a comparison come next, and trains them, until every idea is judged."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scipy import special

from quern.lab.arms import Arm, Train
from quern.lab.ladder.study import TRIALS, Comparison, TrialRecord, at_rung
from quern.lab.options import CompareOptions
from quern.lab.study import now
from quern.lab.verdict import FIRST_LOOK, Finding, Judgement, is_score, judge, reach, score
from quern.records import changed_files, git_output

# Pairs after which an idea is judged: they train in one process, which compiles once.
LOOKS = (FIRST_LOOK, 5, 8, 12, 16, 24, 36, 54, 80)
TUNE_FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)  # multiples of the tuned field that every arm tries
TUNE_SEEDS = (1_000, 1_001)  # seeds that no verdict uses
CURVE_SEEDS = 3  # seeds of the baseline on the rung above the highest one, which its loss over compute needs
BLOCK = 3  # seeds of the baseline that one process trains
LEAST_MARGIN = 0.02  # bits per byte by which a baseline must be below the trigram, and three standard errors
SURE = 0.9  # a delta is refused if even the lower limit (one-sided) of the baseline's noise leaves it out of reach
SETTLED = ("worse", "worse, small", "no difference", "fails")  # verdicts with which an idea does not go up
# Parts of messages of `process.Child.answer` and `arms.on_cluster` that are no errors of the idea: a process died, a
# disk was full, a file was changed meanwhile, a cluster had no room or lost a worker. The next start tries again.
OUTSIDE = re.compile(r"ended with code|\[Errno \d+\]|has changed since the study began|^the cluster has ")


@dataclass(frozen=True)
class Job:
    """Missing trials of one arm at one rung, which one process trains. value: value of the tuned field; block: which
    `BLOCK` of the baseline's seeds."""

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


def judged(study: Comparison, rung: int) -> Judgement:
    """The verdicts on all ideas at a rung, at equal steps. Runs that are the baseline's, bit for bit, say nothing of
    noise."""
    base = _scores(study, study.plan.base, rung)
    runs = {name: scores for name in study.ideas if (scores := _scores(study, name, rung))}
    same = {name for name, own in runs.items() if all(is_score(bpb) and bpb == base.get(at) for at, bpb in own.items())}
    found = judge(base, {name: scores for name, scores in runs.items() if name not in same}, study.plan)
    equal = {
        name: Finding("no difference", len(runs[name]), 0, 0.0, 0.0, math.inf, (0.0, 0.0), math.nan) for name in same
    }
    return found._replace(findings=found.findings | equal)


def _scores(study: Comparison, arm: str, rung: int) -> dict[int, float | None]:
    """The scores of an arm's trials, by seed: None for one that diverged. A trial that ended in an error has none."""
    return {seed: one.bpb for seed, one in judged_trials(study, arm, rung).items() if not one.error}


def judged_trials(study: Comparison, arm: str, rung: int) -> dict[int, TrialRecord]:
    """The trials of an arm that verdicts use, by seed: those with the tuned field's best value that did not tune it."""
    runs = study.runs(arm, rung, chosen(study, arm))
    return {seed: one for seed, one in runs.items() if seed not in TUNE_SEEDS}


def finished(study: Comparison, arm: str, rung: int) -> list[TrialRecord]:
    """The trials of an arm that verdicts use and that have a score."""
    return [one for one in judged_trials(study, arm, rung).values() if is_score(one.bpb)]


def chosen(study: Comparison, arm: str) -> float | None:
    """The best value of the tuned field for an arm, by its trials on the lowest rung; None without tuning."""
    lowest, means = min(map(int, study.plan.rungs)), dict[float, float]()
    for (name, rung, value), trials in study.trials.items() if study.plan.tune else ():
        scores = [score(trials[seed].bpb) for seed in TUNE_SEEDS if seed in trials]
        if name == arm and rung == lowest and value is not None and len(scores) == len(TUNE_SEEDS):
            means[value] = statistics.fmean(scores)
    return min(means, key=lambda value: means[value], default=None)


def wanted(study: Comparison, options: CompareOptions, values: Mapping[str, list[float]], machine: str) -> list[Job]:
    """The jobs that the study lacks now; none once all ideas of this start are judged. values: values of the tuned
    field, by arm of this start, the baseline first; machine: this one, in a line."""
    lowest, ideas = min(map(int, study.plan.rungs)), list(values)[1:]
    jobs = [
        Job(arm, lowest, missing, value)
        for arm, tried in values.items()
        for value in tried
        if (missing := tuple(seed for seed in TUNE_SEEDS if seed not in study.runs(arm, lowest, value)))
    ]
    if jobs:
        return jobs
    for rung in sorted(options.rungs):
        if jobs := _at_rung(study, rung, ideas, machine):
            return jobs
        verdicts = judged(study, rung).findings
        if not options.every:  # an idea that cannot be trained at this rung goes up
            ideas = [name for name in ideas if name not in verdicts or verdicts[name].verdict not in SETTLED]
    above = max(options.rungs) + 1
    return _baseline(study, above, CURVE_SEEDS) if str(above) in study.plan.rungs else []


def _at_rung(study: Comparison, rung: int, ideas: Sequence[str], machine: str) -> list[Job]:
    limit = study.plan.most_pairs
    if jobs := _baseline(study, rung, FIRST_LOOK):
        return jobs
    base = judged_trials(study, study.plan.base, rung)
    # The same seed ends elsewhere on a processor of another kind, so both runs of a pair are trained on one.
    here = [seed for seed, one in sorted(base.items()) if one.machine == machine]
    check_proxy(study, rung)
    verdicts = judged(study, rung).findings
    # Twice the first look's seeds of the baseline: the further ones are compared with the others, an A/A floor.
    jobs, count = list[tuple[int, Job]](), max(2 * FIRST_LOOK, len(base))
    urgent = -1 if count > len(base) else limit  # pairs of an idea that waits for the baseline
    for name in ideas:
        runs = judged_trials(study, name, rung)
        if any(one.error for one in runs.values()):
            continue
        pairs = len(runs)
        if name in verdicts and pairs >= FIRST_LOOK and verdicts[name].verdict != "undecided":
            continue
        goal = min(next((look for look in LOOKS if look > pairs), limit), limit)
        free, lacking = [seed for seed in here if seed not in runs], goal - pairs
        if lacking > len(free):
            count, urgent = max(count, len(base) + lacking - len(free)), min(urgent, pairs)
        elif lacking:
            jobs.append((pairs, Job(name, rung, tuple(free[:lacking]), chosen(study, name))))
    jobs += [(urgent, job) for job in _baseline(study, rung, count)]
    # A first look at all ideas before a second one: they share a variance.
    return [job for _, job in sorted(jobs, key=lambda one: one[0])]


def _baseline(study: Comparison, rung: int, count: int) -> list[Job]:
    base, value = study.plan.base, chosen(study, study.plan.base)
    blocks: dict[int, list[int]] = {}
    for seed in range(count):
        if seed not in study.runs(base, rung, value):
            blocks.setdefault(seed // BLOCK, []).append(seed)
    return [Job(base, rung, tuple(seeds), value, block) for block, seeds in blocks.items()]


class Worker:
    """Trains the jobs of a comparison, one after another, beside other workers. arms: by name, not sized; about: the
    machine, for the records."""

    def __init__(
        self, study: Comparison, arms: Mapping[str, Arm], train: Train, about: str, log: Callable[[str], None]
    ) -> None:
        self.study, self.arms, self.train, self.about, self.log = study, arms, train, about, log
        self.changed = tuple(changed_files(Path(__file__).parent)[:20])
        self.commit = git_output(Path(__file__).parent, "rev-parse", "--short=12", "HEAD")
        self.lost: set[tuple[str, int]] = set()
        self.codes = {name: study.arms[name].code for name in arms}  # another process may register a repaired file

    def run(self, options: CompareOptions) -> bool:
        """Trains until the study lacks no trial. Returns False if a failure from outside left trials, which `lost`
        names."""
        tune = self.study.plan.tune
        values = {
            name: [round(factor * getattr(arm.recipe.optim, tune), 10) for factor in TUNE_FACTORS if tune]
            for name, arm in self.arms.items()
        }

        def jobs() -> list[Job]:
            missing = wanted(self.study, options, values, self.about)
            own = {name for name, code in self.codes.items() if self.study.arms[name].code == code}
            return [one for one in missing if one.arm in own and (one.arm, one.rung) not in self.lost]

        def do(job: Job) -> None:
            judged_later = job.arm != self.study.plan.base and job.seeds[0] not in TUNE_SEEDS
            if judged_later and (said := check_reach(self.study, job.rung, options.any_delta)):
                self.log(said)
            self._train(job)

        self.study.work(jobs, lambda job: job.claim, do)
        return not self.lost

    def _train(self, job: Job) -> None:
        self._check_machine(job.rung)
        plan = self.study.plan
        facts: dict[str, Any] = {
            "rung": job.rung,
            "value": job.value,
            "commit": self.commit,
            "changed": self.changed,
            "machine": self.about,
            "text": plan.text,
            "numbers": plan.numbers[str(job.rung)],
            "code": self.codes[job.arm],
        }
        arm, recipe = self.arms[job.arm], self.arms[job.arm].recipe
        if job.value is not None:
            recipe = replace(recipe, optim=replace(recipe.optim, **{plan.tune: job.value}))
        try:
            sized = replace(arm, recipe=at_rung(recipe, plan.rungs[str(job.rung)]))
            trials = self.train(sized, [(seed, seed) for seed in job.seeds])
            for seed, trial in zip(job.seeds, trials, strict=False):
                self._keep(TrialRecord(**asdict(trial) | facts | {"seed": seed, "time": now()}))
        except (RuntimeError, ValueError) as error:
            if job.arm == plan.base:
                raise
            said = " ".join(str(error).split())
            if OUTSIDE.search(said):
                self.lost.add((job.arm, job.rung))
                self.log(f"rung {job.rung}, {job.arm}: {said}; the same command tries again")
                return
            self._keep(TrialRecord(job.arm, seed=job.seeds[0], error=said[:300], **facts))
            self.log(f"when {job.arm} is repaired, the same command trains it")

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
        defaults = asdict(TrialRecord("", seed=-1, rung=-1))
        self.study.add(TRIALS, {name: value for name, value in asdict(trial).items() if value != defaults[name]})
        score = trial.error or ("diverged" if trial.bpb is None else f"{trial.bpb:.4f} bits per byte")
        value = "" if trial.value is None else f", {self.study.plan.tune} {trial.value:g}"
        self.log(f"rung {trial.rung}, {trial.recipe}{value}, seed {trial.seed}: {score}, {trial.seconds:,.0f} s")


def proxy_line(study: Comparison, rung: int) -> str:
    """The bits per byte of the n-grams that count the baseline's tokens at a rung, and the baseline's own."""
    known, scores = study.ngrams[rung], base_scores(study, rung)
    told = f"unigram {known['1']:.3f}, bigram {known['2']:.3f}, trigram {known['3']:.3f} bits per byte"
    if not scores:
        return told
    spread = f" ± {statistics.stdev(scores):.4f} (SD)" if len(scores) > 1 else ""
    return f"{told}; {study.plan.base} {statistics.fmean(scores):.4f}{spread} over {len(scores)} seeds"


def check_proxy(study: Comparison, rung: int) -> None:
    """Compares the baseline with the trigram that counts the same tokens. Raises ValueError if it is not clearly below:
    verdicts on a rung of the ladder would mean nothing."""
    scores = base_scores(study, rung)
    error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
    most = study.ngrams[rung]["3"] - max(LEAST_MARGIN, 3 * error)
    if study.plan.ladder and scores and statistics.fmean(scores) > most:
        told = f"{proxy_line(study, rung)}: the baseline is not clearly below the trigram"
        raise ValueError(f"rung {rung} is no proxy: {told}: give more text, or a text that it learns faster")


def check_reach(study: Comparison, rung: int, any_delta: bool) -> str:
    """Says what a study can find at a rung, before its first idea is trained there; "" later. Raises ValueError if
    delta is clearly out of reach on the ladder, unless `any_delta` allows that."""
    scores = base_scores(study, rung)
    if len(scores) < 2 or any(judged_trials(study, name, rung) for name in study.ideas):
        return ""
    sd, rules, degrees = math.sqrt(2) * statistics.stdev(scores), study.plan, len(scores) - 1
    effect, delta = reach(sd, rules, len(study.ideas))
    least = math.sqrt(degrees / special.chdtri(degrees, 1 - SURE))
    if study.plan.ladder and least * delta > rules.delta and not any_delta:
        raise ValueError(
            f"rung {rung}: {rules.most_pairs} pairs whose differences have a standard deviation of {sd:.2g} cannot "
            f"show that an idea changes less than {rules.delta:g} bits per byte: give --any-delta, or, in a new study, "
            f"--delta {delta:.2g} or more pairs with --most-pairs"
        )
    return (
        f"rung {rung}: {rules.most_pairs} pairs find an effect of {effect:.4f} bits per byte with a probability "
        f"of 80 %, and can show that an idea changes less than {delta:.4f}, if pairs do not correlate"
    )


def base_scores(study: Comparison, rung: int) -> list[float]:
    """The scores of the baseline that verdicts use."""
    return [one.bpb for one in finished(study, study.plan.base, rung) if one.bpb is not None]
