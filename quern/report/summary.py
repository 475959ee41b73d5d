"""The first sentences of the report: the model, its training data, and its quality."""

import statistics

from quern.conversation_source import BUILT_IN_CONVERSATIONS
from quern.report.numbers import duration, human, percent
from quern.report.run_records import RunRecords, as_object, finite
from quern.report.scores import score_rows, score_stages


def summary(run: RunRecords) -> str:
    """Two sentences at most, from the facts that are recorded."""
    model, stage = as_object(run.recipe.get("model")), run.main_stage
    depth, width, parameters = finite(model.get("depth")), finite(model.get("width")), run.parameters("total")
    tokens, seconds = (stage.last("tokens"), stage.last("seconds")) if stage else (None, None)
    text = "A model"
    if depth is not None and width is not None:
        text += f" of {depth:,.0f} layers, {width:,.0f} wide"
    if parameters is not None:
        text += f", with {human(parameters)} parameters"
    text += f", trained on {human(tokens)} tokens" if tokens is not None else ", not trained yet"
    data = run.recipe.get("data")
    if isinstance(data, str):
        text += f" of {data.rstrip('/').rsplit('/', 1)[-1]}"
    if seconds is not None:
        text += f" in {duration(seconds)}"
    return text + "." + ((_average_accuracy(run) if _trained_on_tinyworld(run) else "") or _bits_per_byte(run))


def _trained_on_tinyworld(run: RunRecords) -> bool:
    """Whether the run learned from the built-in world. Its questions measure nothing otherwise."""
    if run.recipe.get("data", "tinyworld") == "tinyworld":
        return True
    sft = run.stage("sft")
    if sft is None:
        return False
    talks = sft.recipe.get("conversations")
    sources = [as_object(one).get("source") for one in talks] if isinstance(talks, list) else [talks]
    return talks is None or any(source in BUILT_IN_CONVERSATIONS for source in sources)


def _bits_per_byte(run: RunRecords) -> str:
    row = next((row for row in score_rows(run) if row.metric == "bpb"), None)
    scores = zip(score_stages(run), row.scores, strict=True) if row else ()
    known = {name: score.value for name, score in scores if score is not None}
    untrained = known.pop("untrained", None)
    value = list(known.values())[-1] if known else run.main_stage.last("val_bpb") if run.main_stage else None
    if value is None:
        return ""
    before = f", {untrained:.3f} before training" if untrained is not None else ""
    return f" It predicts held-out text at {value:.3f} bits per byte{before}."


def _average_accuracy(run: RunRecords) -> str:
    """The mean over all tasks, so that the summary does not pick the best one."""
    stages = score_stages(run)
    if not stages or stages[-1] == "untrained":
        return ""
    scores = [row.scores[-1] for row in score_rows(run) if row.metric == "accuracy"]
    known = [score for score in scores if score is not None]
    if not known or len(known) < len(scores):
        return ""
    tasks = f"{len(known)} kinds of held-out question" if len(known) > 1 else "held-out questions"
    text = f" Over {tasks} it is right {percent(statistics.mean(score.value for score in known))} of the time"
    chances = [score.chance for score in known if score.chance is not None]
    if len(chances) < len(known):
        return f"{text}."
    return f"{text}, where guessing would be {percent(statistics.mean(chances))} of the time."
