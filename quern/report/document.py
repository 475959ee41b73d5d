"""The report as data: sections of titled groups of blocks. build.py and report.html.jinja render it.

A block is a dataclass; the template has a macro with the same name. Parts without records are left out.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from quern.estimate.own_text import more
from quern.records import objects
from quern.report.plots import Panel, panels
from quern.report.records import (
    STAGE_TITLES,
    Pairs,
    Record,
    RunRecords,
    StageRecords,
    Table,
    as_object,
    duration,
    finite,
    flatten,
    human,
    human_flops,
    number,
    plain,
    tables,
)
from quern.report.scores import ScorePlot, ScoreTable, score_rows, score_settings, score_tables
from quern.terminal import counted

BPB_HEADER = ["with", "bits per byte of held-out text, about"]
EVENT_HEADER = ["time (UTC)", "event", "step", "details"]


@dataclass(frozen=True)
class Facts:
    """Labelled values."""

    pairs: Pairs


@dataclass(frozen=True)
class Command:
    text: str


@dataclass(frozen=True)
class Curves:
    """The curves of a stage; legend: the marks in them."""

    panels: list[Panel]
    legend: list[str]


@dataclass(frozen=True)
class Conversation:
    """turns: (role, parts) with parts (type, text); the types are those of `text/chat.py`."""

    turns: list[tuple[str, list[tuple[str, str]]]]


@dataclass(frozen=True)
class Continuation:
    """A text that the model continued."""

    prompt: str
    text: str


Block = Facts | Table | Command | Curves | ScorePlot | ScoreTable | Conversation | Continuation


@dataclass(frozen=True)
class Group:
    """Blocks under one title. folded: the page shows the title alone until the reader opens the group."""

    title: str
    blocks: Sequence[Block]
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """key: the anchor of the section in the page. folded: the page shows its title alone until the reader opens it."""

    key: str
    title: str
    groups: list[Group]
    folded: bool = False


@dataclass(frozen=True)
class Document:
    """Everything that the report says. tiles: the most important figures."""

    name: str
    summary: str
    tiles: Pairs
    sections: list[Section]


def document(run: RunRecords) -> Document:
    """The report of a run."""
    results = (
        ("evaluation", "Evaluation", [*_evaluation(run), *_more(run)]),
        ("curves", "Training curves", _curves(run)),
        ("samples", "Samples", _samples(run)),
    )
    settings = (
        ("training", "Model and training", _training(run)),
        ("data", "Data", _data(run)),
        ("events", "Events", [Group(s.title, [Table(EVENT_HEADER, _events(s))]) for s in run.stages if s.events]),
        ("reproduction", "Reproduction", _reproduction(run)),
    )
    found = [Section(key, title, list(groups)) for key, title, groups in results]
    found += [Section(key, title, list(groups), folded=bool(found)) for key, title, groups in settings]
    return Document(run.name, _summary(run), _tiles(run), [section for section in found if section.groups])


def _tiles(run: RunRecords) -> Pairs:
    stage, tiles = run.main_stage, [("parameters", run.parameters("total"), human)]
    if stage is not None:
        speeds = stage.column("tokens_per_second")[1]  # a slow first step or a pause does not move the median
        tiles += [
            ("pretraining steps" if stage.name == "pretrain" else "steps", stage.last("step"), number),
            ("training tokens", stage.last("tokens"), human),
            ("compute", stage.last("flops"), human_flops),
            ("time in training steps", stage.last("seconds"), duration),
            ("tokens per second", statistics.median(speeds) if speeds else None, human),
            ("bits per byte, held out", stage.last("val_bpb"), "{:.3f}".format),
        ]
    asked = [row for row in score_rows(run) if row.metric == "accuracy" and row.standing is not None]
    above = [("kinds of question above chance", f"{sum(not row.standing for row in asked)} of {len(asked)}")]
    return [*(above if asked else []), *_shown(tiles)]


def _shown(figures: Iterable[tuple[str, float | None, Callable[[float], str]]]) -> Pairs:
    """The figures that are recorded, as text."""
    return [(label, show(value)) for label, value, show in figures if value is not None]


def _facts(title: str, pairs: Pairs) -> list[Group]:
    return [Group(title, [Facts(pairs)])] if pairs else []


def _training(run: RunRecords) -> Iterable[Group]:
    made_by = run.recipe.get("make_model")
    model: Pairs = [("architecture", made_by.rpartition(":")[2])] if isinstance(made_by, str) else []
    yield from _facts("", [*model, *flatten(as_object(run.recipe.get("model"))), *flatten(run.part("model"))])
    for stage in run.stages:
        asked = as_object(stage.recipe.get("train" if stage.name in ("pretrain", "grug") else stage.name))
        done = (
            ("steps", stage.last("step"), number),
            ("tokens", stage.last("tokens"), number),
            ("FLOPs", stage.last("flops"), human_flops),
            ("last loss", stage.last("loss"), number),
            ("last validation loss", stage.last("val_loss"), number),
            ("time in training steps", stage.last("seconds"), duration),
        )
        # The length is reported as trained, not as planned.
        planned = {key: value for key, value in asked.items() if key not in ("horizon_ratio", "epochs")}
        yield from _facts(stage.title, [*_shown(done), *_length(run, stage, asked), *flatten(planned)])


def _length(run: RunRecords, stage: StageRecords, asked: Record) -> Pairs:
    """Tokens per parameter (of the matrices and the head), or epochs of conversations."""
    if stage.name == "rl":
        return []
    if stage.name != "sft":
        tokens, counted = stage.last("tokens"), run.parameters("kaplan")
        return [("tokens per parameter of matrices and head", number(tokens / counted))] if tokens and counted else []
    data = _data_event(stage)
    known = {**asked, **as_object(stage.recipe.get("model")), **data}
    names = ("batch_tokens", "context", "pieces", "rows", "documents", "documents_without_target")
    batch, context, pieces, rows, documents, empty = (finite(known.get(name)) or 0.0 for name in names)
    usable = documents - empty
    if not (context and rows and usable > 0):
        return []
    # `pieces` conversations fill `rows` rows in the part of the data that is packed first.
    seen = (stage.last("step") or 0.0) * batch / context * pieces / rows
    return [("conversations, about", f"{seen:,.0f}"), ("epochs", f"{seen / usable:.2g}")]


def _data_event(stage: StageRecords) -> Record:
    return next((event for event in reversed(stage.events) if event.get("kind") == "data"), {})


def _data(run: RunRecords) -> Iterable[Group]:
    data, tokenizer = run.part("data"), run.part("tokenizer")
    elsewhere = ("command", "git", "machine", "versions", "model", "data", "tokenizer")
    others = {key: value for key, value in run.run.items() if key not in elsewhere}
    yield from _facts("", [*flatten(data), *flatten(others), *flatten(tokenizer, "tokenizer")])
    for title, table in (*tables(data), *tables(tokenizer, "tokenizer")):
        yield Group(title, [table])
    for stage in run.stages:
        sources = _data_event(stage).get("sources")
        for _, table in tables({"sources": sources}):
            yield Group(f"{stage.title}: conversations of an epoch", [table])


def _curves(run: RunRecords) -> Iterable[Group]:
    for stage in run.stages:
        marks = (("resumed", stage.resumed_at()), ("skipped step", stage.steps_of("skip")))
        legend = [mark for mark, steps in marks if steps]
        if drawn := panels(stage):
            yield Group(stage.title, [Curves(drawn[:1], legend)])
        if drawn[1:]:
            yield Group(f"{stage.title}: more curves", [Curves(drawn[1:], legend)], folded=True)


def _evaluation(run: RunRecords) -> list[Group]:
    shown, numbers = score_tables(run)
    groups = [
        Group("", shown),
        Group("Scores as numbers", numbers, folded=True),
        Group("Evaluation settings", [score_settings(run)] if shown or numbers else [], folded=True),
    ]
    return [group for group in groups if group.blocks]


def _more(run: RunRecords) -> Iterable[Group]:
    """An estimate of the gain from more text or time, for a model of another text than the built-in world."""
    stage, known = run.stage("pretrain"), next(iter(objects(run.part("tokenizer").get("compression"))), {})
    tokens = finite(as_object(run.part("data").get("train")).get("tokens"))
    values = (run.parameters("kaplan"), tokens, finite(known.get("bytes_per_token")))
    parameters, text, ratio = (value or 0.0 for value in values)
    if stage is None or run.recipe.get("data", "tinyworld") == "tinyworld" or not (parameters and text and ratio):
        return
    read, measured = stage.last("tokens"), stage.last("val_bpb")
    if read and measured:
        cases = more(parameters, text * ratio, read * ratio, measured)
        rows = [["this run, measured", f"{measured:.2f}"], *([label, f"{value:.2f}"] for label, value in cases)]
        about = "An estimate, by a law that was fitted to small models of English prose: quern/estimate/own_text.py."
        yield Group("What more text or time would bring", [Facts([("rests on", about)]), Table(BPB_HEADER, rows)])


def _samples(run: RunRecords) -> Iterable[Group]:
    """The latest stage first. Samples of the untrained model are folded beside samples of another stage."""
    stages = list(dict.fromkeys(str(sample.get("stage", "")) for sample in run.samples))[::-1]
    for stage in stages:
        own = [sample for sample in run.samples if str(sample.get("stage", "")) == stage]
        texts = [s for s in own if s.get("kind") == "completion"]
        talks = [objects(s.get("messages")) for s in own if s.get("kind") == "chat"]
        parts = {
            "conversations": [Conversation([*map(_turn, turns)]) for turns in talks],
            "continuations": [Continuation(str(s.get("prompt", "")), str(s.get("text", ""))) for s in texts],
        }
        for name, blocks in parts.items():
            if blocks:
                title = f"{STAGE_TITLES.get(stage, stage)}: {name}"
                yield Group(title, blocks, folded=stage == "untrained" and len(stages) > 1)


def _turn(turn: Record) -> tuple[str, list[tuple[str, str]]]:
    content = turn.get("content")
    parts = objects(content) if isinstance(content, list) else [{"type": "text", "text": content}]
    return str(turn.get("role")), [(str(part.get("type")), str(part.get("text", ""))) for part in parts]


def _events(stage: StageRecords) -> list[list[str]]:
    """One row per event. Consecutive events of one kind, such as saves, share a row."""
    rows = []
    for kind, events in groupby(stage.events, lambda event: str(event.get("kind", "event"))):
        group = list(events)
        steps = filter(None, (plain(event.get("step")) for event in (group[0], group[-1])))
        details = {key: value for key, value in group[-1].items() if key not in ("kind", "step", "time")}
        when = str(group[0].get("time", "")).replace("T", " ")[:19]
        what = f"{kind} ×{len(group)}" if len(group) > 1 else kind
        told = ", ".join(f"{label}: {value}" for label, value in flatten(details))
        rows.append([when, what, "–".join(dict.fromkeys(steps)), told])
    return rows


def _reproduction(run: RunRecords) -> list[Group]:
    seed = run.recipe.get("seed")
    facts = {"git": run.run.get("git"), "seed": None if seed is None else str(seed)}
    found = flatten(facts | run.part("machine") | run.part("versions"))
    later = (event for stage in run.stages for event in stage.events if event.get("changed") != [])
    commands = dict.fromkeys(str(one["command"]) for one in (run.run, *later) if one.get("command"))
    return [Group("", [*map(Command, commands), Facts(found)])] if commands or found else []


def _summary(run: RunRecords) -> str:
    """One sentence, from the facts that are recorded."""
    model, stage = as_object(run.recipe.get("model")), run.main_stage
    depth, width, parameters = finite(model.get("depth")), finite(model.get("width")), run.parameters("total")
    tokens, seconds = (stage.last("tokens"), stage.last("seconds")) if stage else (None, None)
    text = "A model"
    if depth is not None and width is not None:
        text += f" of {counted(round(depth), 'layer')}, {width:,.0f} wide"
    if parameters is not None:
        text += f", with {human(parameters)} parameters"
    source, data = run.run.get("imported"), run.recipe.get("data")
    untrained = f", imported from {Path(source).name}" if isinstance(source, str) else ", not trained yet"
    text += f", trained on {human(tokens)} tokens" if tokens is not None else untrained
    if tokens is not None and isinstance(data, str):
        text += f" of {', '.join(name.rstrip('/').rsplit('/', 1)[-1] for name in data.splitlines()[:3])}"
    if seconds is not None:
        text += f" in {duration(seconds)}"
    return text + "."
