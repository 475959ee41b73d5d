"""report.html: one self-contained page, readable in a light and a dark scheme, on a wide and a narrow screen.

Everything that comes from a record passes through `esc`, since a sample is whatever a model wrote; and the
page's content security policy forbids scripts and any request, so that it stays a document whatever it shows.
"""

import html
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quern.report import facts as facts
from quern.report.numbers import number, percent
from quern.report.plots import Panel, panels
from quern.report.run_records import STAGE_TITLES, RunRecords, StageRecords
from quern.report.summary import summary
from quern.text.printable import printable

SHOWN_SAMPLES = 6
STYLE = Path(__file__).with_name("report.css")


def page(run: RunRecords) -> str:
    """The whole page. Parts without records are left out."""
    sections = [
        ("trained", "What was trained", _trained(run)),
        ("data", "On what", _data(run)),
        ("learned", "How it learned", _learned(run)),
        ("evaluation", "What it can do", _evaluation(run)),
        ("samples", "What it says", _samples(run)),
        ("events", "What happened", _events(run)),
        ("repeat", "How to repeat it", _repeat(run)),
    ]
    shown = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in shown)
    body = "".join(f'<section id="{name}"><h2>{title}</h2>{content}</section>' for name, title, content in shown)
    notes = "".join(f'<p class="note">{esc(note)}</p>' for note in run.notes)
    css = STYLE.read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{esc(run.name)} · quern</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        f'<header><p class="kicker">quern · report of a run</p><h1>{esc(run.name)}</h1>'
        f'<p class="lead">{esc(summary(run))}</p>{_tiles(run)}<nav>{links}</nav></header>\n'
        f"{notes}{body}\n</main>\n</body>\n</html>\n"
    )


def esc(value: Any) -> str:
    """Text for HTML: markup escaped, control characters and lone surrogates shown as a replacement sign."""
    return html.escape(printable(str(value)), quote=True)


def _tiles(run: RunRecords) -> str:
    items = "".join(f"<div><dd>{esc(value)}</dd><dt>{esc(label)}</dt></div>" for label, value in facts.tiles(run))
    return f'<dl class="tiles">{items}</dl>' if items else ""


def _rows(rows: facts.Rows) -> str:
    items = "".join(
        f"<div{' class=wide' if len(value) > 34 else ''}><dt>{esc(label)}</dt><dd>{esc(value)}</dd></div>"
        for label, value in rows
    )
    return f'<dl class="rows">{items}</dl>' if items else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{esc(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{esc(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _trained(run: RunRecords) -> str:
    parts = [_rows(facts.model_rows(run))]
    for stage in run.stages:
        rows = _rows(facts.training_rows(run, stage))
        if rows:
            parts.append(f"<h3>{esc(stage.title)}</h3>{rows}")
    return "".join(parts)


def _data(run: RunRecords) -> str:
    parts = [_rows(facts.data_rows(run))]
    for table in facts.data_tables(run):
        parts.append(f"<h3>{esc(table.title.capitalize())}</h3>{_table(table.header, table.rows)}")
    return "".join(parts)


def _learned(run: RunRecords) -> str:
    parts = []
    for stage in run.stages:
        drawn = "".join(map(_figure, panels(stage)))
        if drawn:
            parts.append(f'<h3>{esc(stage.title)}</h3><div class="panels">{drawn}</div>{_legend(stage)}')
    return "".join(parts)


def _figure(panel: Panel) -> str:
    return (
        f"<figure><figcaption><b>{esc(panel.title)}</b> <span>{esc(panel.unit)}</span>"
        f"<em>{esc(panel.figure)}</em></figcaption>{panel.svg}</figure>"
    )


def _legend(stage: StageRecords) -> str:
    marks = []
    if stage.resumed_at():
        marks.append('<span class="mark dashed"></span>resumed')
    if stage.steps_of("skip"):
        marks.append('<span class="mark alert"></span>step skipped')
    return f'<p class="legend">{" ".join(marks)}</p>' if marks else ""


def _evaluation(run: RunRecords) -> str:
    rows = facts.score_rows(run)
    intro = (
        "<p>Share of held-out questions answered correctly. The line on each bar is its 95% interval "
        "(Wilson), the upright tick is what guessing gets.</p>"
    )
    parts = []
    for title, before, chosen, show in (
        ("Task", intro, [row for row in rows if row.is_share], _share_row),
        ("Measure", "", [row for row in rows if not row.is_share], _other_row),
    ):
        if not chosen:
            continue
        # A stage that was not measured in this table gets no column of dashes.
        names = facts.score_stages(run)
        shown = [i for i in range(len(names)) if any(row.cells[i].value is not None for row in chosen)]
        head = "".join(f"<th>{esc(STAGE_TITLES.get(names[i], names[i]))}</th>" for i in shown)
        body = "".join(show(replace(row, cells=[row.cells[i] for i in shown])) for row in chosen)
        parts.append(
            f'{before}<div class="scroll"><table class="scores"><thead><tr><th>{title}</th>{head}</tr>'
            f"</thead><tbody>{body}</tbody></table></div>"
        )
    if parts:
        setting = facts.score_setting(run)
        parts.append(f"<details><summary>{setting.title}</summary>{_table(setting.header, setting.rows)}</details>")
    return "".join(parts)


def _share_row(row: facts.ScoreRow) -> str:
    chance = f"guessing {percent(row.chance)}" if row.chance is not None else ""
    asked = f"{row.count:,} questions" if row.count is not None else ""
    label = " · ".join(text for text in (asked, chance) if text)
    last = len(row.cells) - 1
    cells = "".join(_share_cell(cell, row, index == last) for index, cell in enumerate(row.cells))
    return f'<tr><th scope="row">{esc(row.task)}<small>{esc(label)}</small></th>{cells}</tr>'


def _share_cell(cell: facts.Cell, row: facts.ScoreRow, last: bool) -> str:
    if cell.value is None:
        return '<td class="none">–</td>'
    interval = tick = whisker = ""
    if cell.low is not None and cell.high is not None:
        interval = f"<small>{100 * cell.low:.0f}–{100 * cell.high:.0f}</small>"
        whisker = f'<i class="whisker" style="left:{_at(cell.low)};right:calc(100% - {_at(cell.high)})"></i>'
    if cell.count not in (None, row.count):
        interval += f"<small>of {cell.count}</small>"
    if row.chance is not None:
        tick = f'<i class="tick" style="left:{_at(row.chance)}"></i>'
    bar = f'<i class="bar" style="width:{_at(cell.value)}"></i>'
    kind = ' class="last"' if last else ""
    track = f'<span class="track">{bar}{tick}{whisker}</span>'
    return f"<td{kind}><b>{percent(cell.value)}</b>{interval}{track}</td>"


def _other_row(row: facts.ScoreRow) -> str:
    amount = f"{row.count:,}" if row.count is not None else ""
    label = f"{amount} bytes" if row.metric == "bpb" and amount else amount
    if row.chance is not None:
        label += f" · guessing {number(row.chance)}"
    name = f"{row.task}, bits per byte" if row.metric == "bpb" else f"{row.task}, {row.metric}"
    cells = "".join(
        '<td class="none">–</td>' if cell.value is None else f"<td><b>{cell.value:.4g}</b></td>" for cell in row.cells
    )
    return f'<tr><th scope="row">{esc(name)}<small>{esc(label)}</small></th>{cells}</tr>'


def _at(share: float) -> str:
    return f"{100 * min(1.0, max(0.0, share)):.2f}%"


def _samples(run: RunRecords) -> str:
    """The latest stage first; the untrained model's noise is folded away."""
    parts = []
    stages = list(dict.fromkeys(str(sample.get("stage", "")) for sample in run.samples))[::-1]
    for stage in stages:
        own = [sample for sample in run.samples if str(sample.get("stage", "")) == stage]
        name = esc(STAGE_TITLES.get(stage, stage))
        drawn = "".join(
            f"<h3>{title} <small>{name}</small></h3>{_folded(shown)}"
            for title, shown in (
                ("Conversations", [_chat(s) for s in own if s.get("kind") == "chat"]),
                ("Continuations", [_completion(s) for s in own if s.get("kind") != "chat"]),
            )
            if shown
        )
        if stage == "untrained" and len(stages) > 1:
            drawn = f"<details><summary>What the untrained model said</summary>{drawn}</details>"
        parts.append(drawn)
    return "".join(parts)


def _folded(drawn: list[str]) -> str:
    shown, rest = drawn[:SHOWN_SAMPLES], drawn[SHOWN_SAMPLES:]
    more = f"<details><summary>{len(rest)} more</summary>{''.join(rest)}</details>" if rest else ""
    return "".join(shown) + more


def _completion(sample: dict[str, Any]) -> str:
    prompt, text = sample.get("prompt", ""), sample.get("text", "")
    return f'<blockquote class="completion"><mark>{esc(prompt)}</mark>{esc(text)}</blockquote>'


def _chat(sample: dict[str, Any]) -> str:
    messages = sample.get("messages")
    messages = messages if isinstance(messages, list) else []
    reply = sample.get("parts") or sample.get("text", "")
    turns = [_bubble(message.get("role"), message.get("content")) for message in messages if isinstance(message, dict)]
    return f'<div class="chat">{"".join(turns)}{_bubble("assistant", reply) if reply else ""}</div>'


def _bubble(role: Any, content: Any) -> str:
    kind = role if role in ("system", "user", "assistant") else "other"
    if isinstance(content, list):
        inner = "".join(_part(part) for part in content if isinstance(part, dict))
    else:
        inner = esc(content if content is not None else "")
    return f'<div class="bubble {kind}"><span class="role">{esc(role)}</span>{inner}</div>'


def _part(part: dict[str, Any]) -> str:
    text = esc(part.get("text", ""))
    if part.get("type") == "tool":
        return f'<code class="tool" title="a call of the calculator">{text}</code>'
    if part.get("type") == "output":
        return f'<code class="output" title="what the tool answered">{text}</code>'
    return f"<span>{text}</span>"


def _events(run: RunRecords) -> str:
    parts = []
    for stage in run.stages:
        rows = facts.event_rows(stage)
        if rows:
            table = _table(["time (UTC)", "event", "step", "details"], rows)
            parts.append(f'<h3>{esc(stage.title)}</h3><div class="events">{table}</div>')
    return "".join(parts)


def _repeat(run: RunRecords) -> str:
    line = facts.command(run)
    shown = f"<pre><code>{esc(line)}</code></pre>" if line else ""
    return shown + _rows(facts.repeat_rows(run))
