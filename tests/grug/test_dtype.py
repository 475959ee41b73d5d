"""The default dtype, for given rates and for the rates of this machine."""

import math

import pytest

from tests.support.jax_process import Grug


@pytest.mark.parametrize(
    ("bf16", "fp32", "faster"),
    [
        ([180.0] * 5, [100.0] * 5, True),
        ([110.0] * 5, [100.0] * 5, False),
        ([30.0] * 5, [100.0] * 5, False),
        # The machine is four times as slow in some rounds, for both dtypes.
        ([160.0, 40.0, 160.0, 40.0], [100.0, 25.0, 100.0, 25.0], True),
        # A single round in which one dtype was slow does not decide.
        ([160.0, 10.0, 160.0], [100.0, 100.0, 100.0], True),
        ([100.0, 100.0, 100.0], [100.0, 10.0, 100.0], False),
    ],
)
def test_bf16_must_be_clearly_faster_round_by_round(
    grug: Grug, bf16: list[float], fp32: list[float], faster: bool
) -> None:
    assert grug("pieces:is_faster", narrow=bf16, wide=fp32) is faster


def test_the_probe_measures_both_in_every_round(grug: Grug) -> None:
    rates = grug("pieces:rates")
    assert list(rates) == ["bfloat16", "float32"]
    assert len(rates["bfloat16"]) == len(rates["float32"]) > 4
    assert all(math.isfinite(rate) and rate > 0 for values in rates.values() for rate in values)


def test_what_is_asked_for_is_taken(grug: Grug) -> None:
    assert grug("pieces:choose_dtype", dtype="fp32") == "float32"
    assert grug("pieces:choose_dtype", dtype="bf16") == "bfloat16"
    assert grug("pieces:choose_dtype", dtype=None) in ("float32", "bfloat16")
