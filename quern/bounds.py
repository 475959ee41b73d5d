"""The range of every number that can be set: one table for recipe fields, flags and sampling parameters.

A name is the flag with underscores, such as `train.log_every`. `validate.check` reads the table for recipes,
`flags/check_flags.py` for flags, `generate/sample.py` for `Sampling`. The ranges exclude values that no run could use
(NaN, infinity, values that overflow later); limits that depend on other fields are in `validate.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """A range of numbers.

    Args:
        low, high: The limits, included unless `above` (low) or `below` (high) excludes one.
        whole: Only whole numbers.
        instead: Text that ends the message about a value outside the range.
    """

    low: float
    high: float
    whole: bool = False
    above: bool = False
    below: bool = False
    instead: str = ""

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        over = value > self.low if self.above else value >= self.low
        return over and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low, high = _shown(self.low), _shown(self.high)
        kind = "a whole number" if self.whole else "a number"
        if self.above:
            return f"{kind} above {low} and at most {high}"
        return f"{kind} of at least {low} and below {high}" if self.below else f"{kind} between {low} and {high}"


def refuse_outside(name: str, value: Any, shown_name: str) -> None:
    """Raises ValueError for a value outside the range of `name`.

    Args:
        name: A key of `BOUNDS`; any finite number is in range for another name.
        value: The value.
        shown_name: The field's name in the message.
    """
    bounds = BOUNDS.get(name, ANY)
    if value not in bounds:
        given = repr(value)
        given = given if len(given) <= SHOWN_CHARACTERS else f"{given[:SHOWN_CHARACTERS]}…"
        raise ValueError(f"{shown_name} must be {bounds}, not {given}{bounds.instead}")


def _shown(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _whole(low: int, high: int) -> Bounds:
    return Bounds(low, high, whole=True)


SHOWN_CHARACTERS = 40
ANY = Bounds(-1e300, 1e300)
COUNT = _whole(1, 10**12)
"""Steps and tokens."""
FEW = _whole(1, 10**6)
"""Processes, devices, questions."""
SEED = _whole(0, 10**18)
POSITIVE = Bounds(0, 1e9, above=True)
RATE = Bounds(0, 1000)
MEGABYTES = Bounds(0, 1e6, above=True)
THREADS = _whole(1, 4096)
SHARE = Bounds(0, 1)

BOUNDS: Mapping[str, Bounds] = {
    "depth": _whole(1, 1000),
    "seed": SEED,
    "data_seed": SEED,
    "shards": FEW,
    "text.vocab_size": _whole(300, 2**20),
    "text.digits": _whole(1, 3),
    "text.tokenizer_megabytes": MEGABYTES,
    "text.tinyworld_megabytes": MEGABYTES,
    "text.tinyworld_conversations": _whole(1, 10**8),
    "conversations.repeats": Bounds(0, 10_000, above=True),
    "conversations.limit": COUNT,
    "text.val_megabytes": MEGABYTES,
    "model.depth": _whole(1, 1000),
    "model.width": _whole(12, 2**17),  # the gates of `gpt` and `unet` read 12 channels
    "model.head_dim": _whole(2, 2**14),
    "model.heads": _whole(1, 2**14),
    "model.kv_heads": _whole(1, 2**14),
    "model.context": _whole(2, 2**24),
    "model.vocab_size": _whole(1, 2**24),
    "model.bos": _whole(0, 2**24),
    "model.rope_base": Bounds(1, 1e12, above=True),
    "model.softcap": POSITIVE,
    "model.mlp_width": _whole(1, 2**20),
    "model.norm_eps": Bounds(0, 1, above=True),
    "model.dropout": Bounds(0, 1, below=True),
    "optim.matrix_lr": RATE,
    "optim.head_lr": RATE,
    "optim.embedding_lr": RATE,
    "optim.value_embedding_lr": RATE,
    "optim.residual_lr": RATE,
    "optim.x0_lr": RATE,
    "optim.smear_lr": RATE,
    "optim.gate_lr": RATE,
    "optim.matrix_decay": RATE,
    "optim.batch_exponent": SHARE,
    "optim.lr_scale": POSITIVE,
    "optim.decay_scale": Bounds(0, 1e12),
    "optim.table_decay_scale": Bounds(0, 1e12),
    "optim.width_scale": POSITIVE,
    "optim.eps": Bounds(0, 1, above=True),
    "optim.muon_beta2": Bounds(0, 1, below=True),
    "optim.muon_steps": _whole(1, 100),
    "train.steps": COUNT,
    "train.minutes": Bounds(0, 1e6, above=True),
    "train.horizon_ratio": Bounds(0, 1e6, above=True),
    "train.batch_tokens": COUNT,
    "train.micro_batch_tokens": COUNT,
    "train.warmup_steps": _whole(0, 10**12),
    "train.warmdown_share": SHARE,
    "train.final_lr": RATE,
    "train.clip_norm": Bounds(0, 1e9, above=True, instead=": leave it out for no clipping"),
    "train.log_every": COUNT,
    "train.eval_every": COUNT,
    "train.save_every": COUNT,
    "train.keep": FEW,
    "train.max_skips": _whole(0, 10**6),
    "train.recompute": _whole(0, 1000),
    "sft.epochs": Bounds(0, 1e6, above=True),
    "sft.steps": COUNT,
    "sft.batch_tokens": COUNT,
    "sft.lr_share": RATE,
    "sft.warmdown_share": SHARE,
    "rl.seed": SEED,
    "rl.steps": COUNT,
    "rl.groups": FEW,
    "rl.samples": _whole(2, 10**6),
    "rl.max_tokens": COUNT,
    "rl.lr_share": RATE,
    "rl.warmdown_share": SHARE,
    "rl.resample": _whole(0, 1000),
    "rl.kl": RATE,
    "rl.overlong_tokens": _whole(0, 10**12),
    "rl.updates": FEW,
    "rl.clip_low": SHARE,
    "rl.clip_high": RATE,
    "rl.val_questions": FEW,
    "rl.val_samples": FEW,
    "sandbox.seconds": Bounds(0, 1e6, above=True),
    "sandbox.cpu_seconds": Bounds(0, 1e6, above=True),
    "sandbox.memory_megabytes": _whole(32, 10**6),  # the interpreter has about 30
    "sandbox.file_megabytes": _whole(1, 1000),
    "sandbox.output_kilobytes": _whole(1, 1000),
    "sandbox.threads": _whole(0, 1000),
    # Flags that are not recipe fields.
    "threads": THREADS,
    "questions": FEW,
    "limit": _whole(1, 10**7),
    "ranks": FEW,
    "tp": FEW,
    "nodes": FEW,
    "samples": FEW,
    "restarts": _whole(0, 10**6),
    "timeout": Bounds(0, 1e6, above=True),
    "temperature": Bounds(0, 100),
    "top_k": _whole(0, 2**24),
    "top_p": SHARE,
    "min_p": SHARE,
    "presence_penalty": Bounds(-2, 2),
    "frequency_penalty": Bounds(-2, 2),
    "repetition_penalty": Bounds(0, 100, above=True),
    "max_tokens": COUNT,
    "port": _whole(0, 2**16 - 1),
    "rounds": FEW,
    "documents": _whole(1, 10**9),
    "batch_tokens": COUNT,
    "megabytes": MEGABYTES,
    "prefix_megabytes": Bounds(0, 1e6),
    "watch_seconds": Bounds(0, 1e6),
    "replicas": _whole(1, 1024),
    "requests_per_minute": _whole(0, 10**9),
    "requests_at_once": _whole(0, 10**9),
    "request_seconds": Bounds(0, 1e6, above=True),
    "minutes": Bounds(0, 1e6, above=True),
    "gpus": FEW,
    "per_machine": FEW,
    "matmul_tflops": Bounds(0, 1e6, above=True),
    "dollars_per_hour": Bounds(0, 1e6),
    "steps": FEW,
    "budgets": Bounds(0, 1e30, above=True),
    "seeds": FEW,
    "tokens_per_second": POSITIVE,
    "resamples": _whole(100, 10**6),
    "level": Bounds(0.5, 0.999),
    "cpu_devices": THREADS,
    "mesh.replica_dcn": FEW,
    "mesh.replica": FEW,
    "mesh.data": FEW,
    "mesh.model": FEW,
    "trials": FEW,
    "evaluations": FEW,
    "sampler_seed": SEED,
    "workers": FEW,
    "alpha": Bounds(1e-6, 0.5),
    "delta": RATE,
    "most_pairs": _whole(1, 1000),
    "rungs": _whole(0, 100),
    "processes.count": FEW,
    "processes.id": _whole(0, 10**6),
}
