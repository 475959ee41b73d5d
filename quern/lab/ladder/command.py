"""`quern lab compare`, `quern lab ladder` and `quern lab calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path

from quern import machine as machines
from quern.cluster import connect
from quern.data.packing import windows
from quern.flags.recipe_file import map_paths
from quern.flags.recipe_flags import field_names
from quern.kernels.attention.autotune import select_attention
from quern.lab.arms import Arm, in_process, on_cluster
from quern.lab.axes import measure_speed, ngram_bits
from quern.lab.ladder.report import calibration, study_lines, write_verdicts
from quern.lab.ladder.study import (
    BASELINES,
    RUNGS,
    SPEEDS,
    ArmRecord,
    Comparison,
    Plan,
    Rung,
    at_rung,
    code_fingerprint,
    numbers,
    one_size,
)
from quern.lab.ladder.work import Worker, finished, proxy_line
from quern.lab.options import OF_TEXT, CompareOptions
from quern.lab.study import now, start_facts
from quern.process import together
from quern.recipe import OPERATIONAL, Recipe, Resolved
from quern.resolve import resolve
from quern.runs.origin import SHOWN
from quern.runs.training import fit_to_text, make_batches
from quern.stages.prepare import Prepared, prepare
from quern.terminal import counted
from quern.validate import flag

SET_BY_RUNGS = ("depth", "model.width", "model.head_dim", "model.context", "text.vocab_size", "train.steps")


def run(
    arms: Sequence[Arm],
    options: CompareOptions,
    named: Collection[str],
    command: str,
    log: Callable[[str], None],
    answers: Mapping[str, Sequence[str]] | None = None,
) -> int:
    """Runs a comparison of arms, the baseline first. Returns the exit code: 1 if an arm could not be trained. named:
    fields that flags name; command: the command line; answers: verdicts that are right, by idea, to test the lowest
    rung on."""
    base, rungs = arms[0], RUNGS if options.ladder else one_size(arms[0].recipe)
    _check(base, options, named, rungs)
    if not options.ladder and not options.study:
        options = replace(options, study="-".join(arm.name for arm in arms)[:60])
    folder = options.folder
    device = options.device_arguments(1 if options.ray else options.workers)
    machine = machines.detect(**device)
    if options.ray:
        connect(options.ray)
    sized = {rung: resolve(at_rung(base.recipe, one)) for rung, one in rungs.items()}
    prepared = prepare(sized[min(rungs)], options.out, log)
    facts = start_facts(machine, command)
    plan = Plan(
        base=base.name,
        rungs={str(rung): one for rung, one in rungs.items()},
        numbers={str(rung): numbers(one) for rung, one in sized.items()},
        text=(prepared.origin.text or "")[:SHOWN],
        data=Path(base.recipe.data).name,
        facts=facts,
        **{name: getattr(options, name) for name in ("delta", "alpha", "most_pairs", "tune", "ladder")},
    )
    records: list[ArmRecord] = []
    for arm in arms:
        public = map_paths(arm.recipe, lambda path: Path(path).name).to_json()  # names of files, not places
        code = code_fingerprint(arm.source, arm.recipe)
        records.append(ArmRecord(arm.name, now(), facts["commit"], code, public, arm.source or ""))
    study = Comparison.of(folder, plan, records)
    for rung in sorted(options.rungs):
        _count_ngrams(study, rung, sized[rung], prepared)
        log(f"rung {rung}: {proxy_line(study, rung)}")
    by_name, variables, whole = {arm.name: arm for arm in arms}, machines.worker_variables(machine), list[bool]()

    def work(number: int) -> None:
        train = on_cluster(options.out, device) if options.ray else in_process(options.out, device, variables(number))
        whole.append(Worker(Comparison(folder), by_name, train, machine_line(machine), log).run(options))

    together(options.workers, work)
    study.refresh()
    write_verdicts(study)
    if options.speeds:
        _measure_speeds(study, by_name, options.out, select_attention(machine), log)
    for line in [*study_lines(study), *(calibration(study, min(options.rungs), answers) if answers else ())]:
        log(line)
    out = options.out_flag
    log(f"record: {folder}; the next step: `quern lab log --study {study.name}{out}`, or `quern lab board{out}`")
    failed = any(one.error for runs in study.trials.values() for one in runs.values())
    return 0 if all(whole) and not failed else 1


def _check(base: Arm, options: CompareOptions, named: Collection[str], rungs: Mapping[int, Rung]) -> None:
    if options.tune and not isinstance(getattr(options.recipe.optim, options.tune, None), float):
        raise ValueError(f"--tune {options.tune} is no rate: use a field of the optimizer, such as matrix_lr")
    if options.ladder:
        if set_by := sorted(set(SET_BY_RUNGS) & set(named)):
            raise ValueError(f"a rung sets {', '.join(set_by)}: leave it out, or use `quern lab compare` at one size")
        if unknown := [str(rung) for rung in options.rungs if rung not in rungs]:
            raise ValueError(f"there is no rung {', '.join(unknown)}: use {', '.join(map(str, rungs))}")
    elif options.every or set(options.rungs) != {0}:
        raise ValueError("--rungs and --every are for the ladder: add --ladder, or leave them out")
    elif resolve(base.recipe).train.steps == 1:
        raise ValueError("--train.steps must be at least 2, since the first step is not timed")


def refuse_lost(base: Recipe, ideas: Mapping[str, Recipe], named: Collection[str], ladder: bool) -> None:
    """Raises ValueError if an idea's file sets a field that a flag (`named`) or the study sets for all arms, since the
    verdict would be of an idea without it; and if it is validated on another text. base, ideas: as in their files,
    without flags."""
    text = {"val"} if base.val or "val" in named else set(OF_TEXT.split())
    by_study = {"train.steps", "train.horizon_ratio", "seed", "data_seed", *(["depth"] if ladder else [])}
    for name, recipe in ideas.items():
        known = {*field_names(recipe)} & {*field_names(base)}
        own = {field for field in known if attrgetter(field)(recipe) != attrgetter(field)(base)}
        if lost := sorted(own & {*by_study, *named} - OPERATIONAL):
            by, what = (f"--{flag(lost[0])}", "the flag") if lost[0] in named else ("the study", "it")
            raise ValueError(f"{name} sets {lost[0]}, which {by} sets for all arms: leave {what} out")
        if other := sorted(own & text):
            raise ValueError(
                f"{name} sets {other[0]}, and so another validation text: leave it out, or give all arms --val"
            )


def machine_line(machine: machines.Machine) -> str:
    """The machine in one line, for the record of each trial."""
    about = machine.describe()
    return (
        f"{about['device']} {about['dtype']}{' compiled' if about['compiled'] else ''}, "
        f"{counted(machine.threads, 'thread')}, {about['processor']}, torch {about['torch']}"
    )


def _count_ngrams(study: Comparison, rung: int, recipe: Resolved, prepared: Prepared) -> None:
    """Counts the n-grams of the tokens that seed 0 of the baseline reads at a rung, once for a study."""
    recipe, tokenizer = fit_to_text(recipe, prepared.tokenizer, prepared.train), prepared.tokenizer
    assert tokenizer.bos is not None

    def count(rung: int) -> None:
        batches = make_batches(recipe, prepared.train)
        val = windows(prepared.val, recipe.model.context, rows=recipe.micro_batch_rows)
        train = (batches.batch(step) for step in range(recipe.train.steps))
        bits = ngram_bits(train, val, tokenizer.token_bytes(), tokenizer.bos)
        study.add(BASELINES, {"rung": rung, **{str(order): round(value, 4) for order, value in bits.items()}})

    study.work(lambda: [] if rung in study.ngrams else [rung], lambda rung: f"ngrams-{rung}", count)


def _measure_speeds(
    study: Comparison, arms: Mapping[str, Arm], out: Path, machine: machines.Machine, log: Callable[[str], None]
) -> None:
    """Measures each idea on each rung on which it has a finished trial and no speed."""
    for number, rung in sorted((int(number), rung) for number, rung in study.plan.rungs.items()):
        base = at_rung(arms[study.plan.base].recipe, rung)
        for idea in list(arms)[1:]:
            with study.claim(f"speed-{number}-{idea}") as mine:
                if not mine or (idea, number) in study.speeds or not finished(study, idea, number):
                    continue
                try:
                    speed = measure_speed(base, at_rung(arms[idea].recipe, rung), out, machine)
                except (ValueError, RuntimeError) as error:
                    log(f"rung {number}, {idea}: no speed, {error}")
                    continue
                study.add(SPEEDS, {"recipe": idea, "rung": number, **asdict(speed)})
                log(f"rung {number}, {idea}: {speed}")
