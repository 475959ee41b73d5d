"""FP8 in NumPy, from the formats' definition (OCP OFP8; arXiv 2209.05433): the oracle, without a cast of torch's.

Every finite number of a format stands in a table, made from its sign, exponent and mantissa bits. Rounding picks the
nearest entry, of two equally near ones that with an even code, and of all beyond the last the last.
"""

from typing import NamedTuple

import numpy as np


class Format(NamedTuple):
    """values: the numbers of the codes 0, 1, …, ascending; unit: half the spacing over a number, at most;
    tiny: half the spacing of the subnormal numbers."""

    values: np.ndarray
    unit: float
    tiny: float


def _format(exponent_bits: int, mantissa_bits: int, codes: int) -> Format:
    bias = 2 ** (exponent_bits - 1) - 1
    code = np.arange(codes)
    exponent, mantissa = code >> mantissa_bits, code % 2**mantissa_bits / 2**mantissa_bits
    normal = (1 + mantissa) * 2.0 ** (exponent - bias)
    values = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), normal)
    return Format(values, 2.0 ** -(mantissa_bits + 1), 2.0 ** -(bias + mantissa_bits))


E4M3 = _format(4, 3, 0x7F)  # the last code is NaN, and there is no infinity
E5M2 = _format(5, 2, 0x7C)  # from here on infinity and NaN


def rounded(x: np.ndarray, to: Format) -> np.ndarray:
    """Each number's nearest in the format, in float64."""
    size = np.abs(np.asarray(x, dtype=np.float64))
    above = np.searchsorted(to.values, size).clip(1, len(to.values) - 1)
    below = above - 1
    low, high = size - to.values[below], to.values[above] - size
    even = np.where(above % 2 == 0, above, below)
    code = np.where(low < high, below, np.where(high < low, above, even))
    return np.copysign(to.values[code], x)


def scale_of(x: np.ndarray, to: Format) -> np.float32:
    """Such that the largest magnitude becomes the format's largest number, in fp32."""
    return np.float32(np.abs(x).max()) / np.float32(to.values[-1])


def through(x: np.ndarray, to: Format, scale: np.float32 | None = None) -> np.ndarray:
    """Returns x after the format: rounded(x / scale) · scale, the division in fp32, in float64."""
    scale = scale_of(x, to) if scale is None else scale
    return rounded(x.astype(np.float32) / scale, to) * np.float64(scale)
