"""Trains the arms of a comparison in this process: faster than in children, which start PyTorch for each."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quern.lab.arms import EVALUATIONS, Arm, Seeds, Train, trainer_for
from quern.lab.trainer import Trial
from quern.machine import detect


def train_here(out: Path, machine: Mapping[str, Any]) -> Train:
    def train(arm: Arm, seeds: Iterable[Seeds]) -> Iterator[Trial]:
        trainer = trainer_for(arm.recipe, out, detect(**machine))
        for seed, data_seed in seeds:
            yield trainer.train(arm.recipe, name=arm.name, seed=seed, data_seed=data_seed, evaluations=EVALUATIONS)

    return train
