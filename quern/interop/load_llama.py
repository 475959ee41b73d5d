"""The trained Llama of a run, for export: loaded in fp32, with refusals of models that no Llama format can hold."""

from __future__ import annotations

from collections.abc import Callable

from quern.machine import detect
from quern.model.llama import Llama
from quern.recipe import ResolvedModel
from quern.runs.load import LoadedModel, load
from quern.runs.run_dir import RunDir


def load_llama(run_dir: RunDir, stage: str | None, log: Callable[[str], None]) -> LoadedModel:
    """Loads the newest intact checkpoint of a stage (None: the last stage).

    Raises:
        FileNotFoundError: There is no such run.
        ValueError: The model is not a Llama, or its attention has windows.
    """
    loaded = load(run_dir, detect("cpu", "fp32", compile=False), log, stage)
    if type(loaded.model) is not Llama:
        raise ValueError(
            f"run '{run_dir.run}' holds a {type(loaded.model).__name__}, for which other programs have no name: "
            "export a run of the recipe `llama` (quern pretrain llama)"
        )
    refuse_windows(loaded.recipe.model)
    return loaded


def refuse_windows(shape: ResolvedModel) -> None:
    """Raises ValueError for a Llama whose attention has windows."""
    if any(window is not None for window in shape.window_sizes()):
        raise ValueError(
            f"the model's attention has windows ({shape.windows}), the Llama of other programs sees everything: "
            "train with --model.windows L"
        )
