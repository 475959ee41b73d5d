"""`quern lab log`: the experiment log, one page per study and the ideas' verdicts, all from records.

The records of a study are copied to `experiments/records/STUDY/`. `docs/experiments/STUDY.md` with its figures,
`experiments/LOG.md` and the `Verdict:` in the docstring of each idea's file are generated from them.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quern.lab.figures import curves, intervals
from quern.lab.idea import Idea, read_idea, with_verdict
from quern.lab.results import HEAD, Result, all_results
from quern.lab.study import TRIALS, Study, read_study
from quern.temporaries import write_whole

HEADER = "<!-- Generated from experiments/records by `quern lab log`. -->\n\n"
FIGURES_OF_A_STUDY = 12
"""A study with more ideas has no curves of single ones."""


@dataclass(frozen=True)
class LogOptions:
    """Flags of `quern lab log`."""

    study: tuple[str, ...] = ()
    """Studies under out/lab to publish. Default: those that were published before, from their records."""
    out: Path = Path("out")
    """The output folder, which has the studies."""
    folder: Path = Path(".")
    """The folder with experiments/ and docs/."""


def run(options: LogOptions, log: Callable[[str], None]) -> int:
    """Publishes studies and renews every page. Returns the exit code."""
    records = options.folder / "experiments" / "records"
    for name in options.study:
        source = options.out / "lab" / name
        read_study(source)
        (records / name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / TRIALS, records / name / TRIALS)
        body = json.loads((source / "study.json").read_text(encoding="utf-8"))
        write_whole(records / name / "study.json", json.dumps(_without_paths(body), indent=1) + "\n")
    found = (read_study(path.parent) for path in records.glob("*/study.json"))
    studies = sorted(found, key=lambda study: (study.facts["registered"], study.name))
    for path, text in pages(studies).items():
        (options.folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(options.folder / path, text)
        log(f"wrote {path}")
    for path, text in idea_files(studies, options.folder / "experiments").items():
        write_whole(path, text)
        log(f"wrote the verdicts in {path}")
    return 0


def _without_paths(study: dict[str, Any]) -> dict[str, Any]:
    """A registration without the folders of absolute paths: records are published, folders are private. The
    fingerprint identifies the text."""
    text = json.dumps(study)
    for recipe in study["recipes"].values():
        for name in filter(None, (recipe["data"], recipe["val"])):
            text = text.replace(json.dumps(name)[1:-1], Path(name).name)
    body = json.loads(text)
    words = (word.rpartition("=") for word in shlex.split(body["facts"]["command"]))
    body["facts"]["command"] = shlex.join(
        f"{flag}{equals}{Path(value).name if value.startswith('/') else value}" for flag, equals, value in words
    )
    return body


def pages(studies: Sequence[Study]) -> dict[str, str]:
    """The text of every generated page and figure, by its path in the project."""
    found = {"experiments/LOG.md": log_page(studies)}
    for study in studies:
        results = all_results(study)
        for axis in study.registration.axes:
            if len(study.registration.ideas) > 1:
                found[f"docs/experiments/{study.name}-{axis}.svg"] = intervals(results, study.registration.delta, axis)
        if len(study.registration.ideas) <= FIGURES_OF_A_STUDY:
            for idea in study.registration.ideas:
                found[f"docs/experiments/{study.name}-{idea}.svg"] = curves(study, idea)
        found[f"docs/experiments/{study.name}.md"] = study_page(study, results)
    return found


def idea_files(studies: Sequence[Study], folder: Path) -> dict[Path, str]:
    """The files of ideas, and their index, whose verdicts change: path → new text. An idea's last study decides."""
    found: dict[str, tuple[Study, list[Result]]] = {}
    for study in studies:
        for one in all_results(study):
            if found.get(one.idea, (None, []))[0] is not study:
                found[one.idea] = study, []
            found[one.idea][1].append(one)
    index = folder / "README.md"
    texts = {path: path.read_text(encoding="utf-8") for path in (index, *folder.glob("*.py")) if path.exists()}
    changed = dict(texts)
    for idea, (study, results) in found.items():
        path = folder / f"{idea}.py"
        if path in texts:
            changed[path] = with_verdict(texts[path], _verdict_line(study, results))
        if index in texts:
            short = ", ".join(f"{one.axis}: {one.verdict}" for one in results)
            row = re.compile(rf"^(\| \[{idea}\.py\].*\| )[^|]*( \|)$", re.MULTILINE)
            changed[index] = row.sub(lambda match, short=short: f"{match[1]}{short}{match[2]}", changed[index])
    return {path: text for path, text in changed.items() if text != texts[path]}


def log_page(studies: Sequence[Study]) -> str:
    """experiments/LOG.md: every idea of every study in one table."""
    lines = [
        "# The experiment log\n",
        "Each row is an idea against the baseline of its study, over paired seeds. Differences are in bits per byte "
        "of held-out text: below 0 the idea is better. [How a verdict is reached](../docs/statistics.md).\n",
    ]
    for study in studies:
        registered = study.registration
        lines += [
            f"## [{study.name}](../docs/experiments/{study.name}.md)\n",
            _setup(study) + "\n",
            "| idea | " + " | ".join(f"equal {axis}" for axis in registered.axes) + " | published | agrees |",
            "|---" * (len(registered.axes) + 3) + "|",
        ]
        results = all_results(study)
        for idea in registered.ideas:
            own = {one.axis: one for one in results if one.idea == idea}
            cells = [_cell(own.get(axis)) for axis in registered.axes]
            about = _about(study, idea)
            lines.append(
                f"| {idea} | {' | '.join(cells)} | {about.direction or ''} | {agreement(about, own.get('steps'))} |"
            )
        lines.append("")
    return HEADER + "\n".join(lines)


def study_page(study: Study, results: Sequence[Result]) -> str:
    """One page: hypothesis, setup, tables on the axes, figures, agreement, how to repeat."""
    registered = study.registration
    lines = [f"# {study.name}\n", _setup(study) + "\n"]
    for axis in registered.axes:
        lines += [f"## Equal {axis}\n"]
        if len(registered.ideas) > 1:
            lines += [f"![Intervals of all ideas at equal {axis}]({study.name}-{axis}.svg)\n"]
        lines += [
            f"| {' | '.join(HEAD)} |",
            "|---" + "|--:" * (len(HEAD) - 1) + "|",
            *(f"| {' | '.join(one.cells())} |" for one in results if one.axis == axis),
            "",
        ]
    lines += ["## The ideas\n"]
    for idea in registered.ideas:
        about, own = _about(study, idea), {one.axis: one for one in results if one.idea == idea}
        lines += [f"### {idea}\n", f"{about.title}\n"]
        parts = {"Hypothesis": about.hypothesis, "Source": about.source, "Expected effect": about.expected}
        lines += [*(f"- **{name}**: {text}" for name, text in parts.items() if text)]
        lines += [f"- **Agreement with the source**: {agreement(about, own.get('steps')) or 'no prediction'}"]
        lines += [f"- **Outliers**: {text}" for text in _outliers(own.values())]
        if len(registered.ideas) <= FIGURES_OF_A_STUDY:
            lines += ["", f"![{idea} minus {registered.base}]({study.name}-{idea}.svg)"]
        lines.append("")
    lines += ["## Repeat it\n", f"```\n{study.facts.get('command', '')}\n```\n"]
    return HEADER + "\n".join(lines)


def agreement(about: Idea, result: Result | None) -> str:
    """yes, no or open: whether the verdict at equal steps is what the source predicts; "" without a prediction."""
    if about.direction is None or result is None:
        return ""
    return "open" if not result.decided else "yes" if result.verdict == about.direction else "no"


def _setup(study: Study) -> str:
    registered, machine = study.registration, study.facts["machine"]
    recipe = registered.recipes[registered.base]
    tokens = recipe["train"]["batch_tokens"]
    return (
        f"Baseline `{registered.base}`: depth {recipe['depth']}, {registered.steps:,} steps of {tokens:,} tokens on "
        f"`{recipe['data']}` (text {registered.text}). Registered {study.facts['registered']}: {registered.metric}; "
        f"margin ±{registered.delta:g}, α {registered.alpha:g} over {len(registered.ideas)} ideas, "
        f"τ² {registered.tau2:g}, at most {registered.most_pairs} pairs, which find "
        f"{registered.detectable_sd:g} standard deviations of the pairs' differences with a probability of 80 %. "
        f"Noise of the baseline over seeds: {_noise(study)}. "
        f"Machine: {machine['processor']}, {machine['dtype']}, torch {machine['torch']}."
    )


def _noise(study: Study) -> str:
    registered = study.registration
    scores = [
        trial.bpb
        for pair in range(registered.most_pairs)
        if (trial := study.find(registered.base, pair, registered.steps)) and trial.bpb is not None
    ]
    if len(scores) < 2:
        return "not measured"
    mean = sum(scores) / len(scores)
    deviation = (sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)) ** 0.5
    return f"{mean:.4f} ± {deviation:.4f} bits per byte (standard deviation of {len(scores)})"


def _about(study: Study, idea: str) -> Idea:
    source = study.registration.sources.get(idea)
    return read_idea(source) if source else Idea(f"The recipe `{idea}`.")


def _cell(result: Result | None) -> str:
    if result is None:
        return "not measured"
    return f"{result.verdict}, {result.paired.mean:+.4f}"


def _verdict_line(study: Study, results: Sequence[Result]) -> str:
    parts = [
        f"{one.verdict} at equal {one.axis} ({one.paired.mean:+.4f} bits per byte, {one.paired.n} pairs)"
        for one in results
    ]
    return f"{'; '.join(parts)}. Study {study.name}."


def _outliers(results: Iterable[Result]) -> list[str]:
    return [
        f"equal {one.axis}: pairs {', '.join(str(one.pairs[at] + 1) for at in one.paired.outliers)}"
        for one in results
        if one.paired.outliers
    ]
