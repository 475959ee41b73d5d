"""The report's first sentences: the model, what it was trained on, and how good it is."""

import statistics

from quern.report.facts import main_stage, score_rows, score_stages, total_parameters
from quern.report.numbers import duration, human, percent
from quern.report.run_records import RunRecords, finite


def summary(run: RunRecords) -> str:
    """One or two sentences on the run, from whatever is recorded."""
    model = run.recipe.get("model")
    model = model if isinstance(model, dict) else {}
    stage, parameters = main_stage(run), total_parameters(run)
    depth, width = finite(model.get("depth")), finite(model.get("width"))
    text = "A model"
    if depth is not None and width is not None:
        text += f" of {depth:,.0f} layers, {width:,.0f} wide"
    if parameters is not None:
        text += f", with {human(parameters)} parameters"
    text += ","
    if stage is not None and stage.last("tokens") is not None:
        text += f" trained on {human(stage.last('tokens') or 0)} tokens"
    else:
        text += " not trained yet"
    data = run.recipe.get("data")
    if isinstance(data, str):
        text += f" of {data.rstrip('/').rsplit('/', 1)[-1]}"
    if stage is not None and stage.last("seconds") is not None:
        text += f" in {duration(stage.last('seconds') or 0)}"
    return text + "." + ((_average_answer(run) if _knows_the_world(run) else "") or _bits_per_byte(run))


def _knows_the_world(run: RunRecords) -> bool:
    """Whether the run learned from the built-in world, whose questions would else say nothing about it."""
    sft = run.stage("sft")
    return run.recipe.get("data", "tinyworld") == "tinyworld" or (
        sft is not None and sft.recipe.get("conversations") is None
    )


def _bits_per_byte(run: RunRecords) -> str:
    row = next((row for row in score_rows(run) if row.metric == "bpb"), None)
    scores = dict(zip(score_stages(run), row.cells, strict=True)) if row else {}
    known = {name: cell.value for name, cell in scores.items() if cell.value is not None}
    untrained = known.pop("untrained", None)
    stage = main_stage(run)
    value = list(known.values())[-1] if known else stage.last("val_bpb") if stage is not None else None
    if value is None:
        return ""
    before = f", {untrained:.3f} before training" if untrained is not None else ""
    return f" It predicts held-out text at {value:.3f} bits per byte{before}."


def _average_answer(run: RunRecords) -> str:
    """The mean over all tasks, not the best of them: a summary must not pick."""
    stages = score_stages(run)
    if not stages or stages[-1] == "untrained":
        return ""
    rows = [row for row in score_rows(run) if row.is_share]
    values = [row.cells[-1].value for row in rows]
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return ""
    tasks = f"{len(known)} kinds of held-out question" if len(known) > 1 else "held-out questions"
    text = f" Over {tasks} it is right {percent(statistics.mean(known))} of the time"
    chances = [row.chance for row in rows if row.chance is not None]
    if len(chances) < len(rows):
        return f"{text}."
    return f"{text}, where guessing would be {percent(statistics.mean(chances))} of the time."
