"""FP8 by ml_dtypes (OCP OFP8; arXiv 2209.05433): the oracle, without a cast of torch's."""

from typing import NamedTuple

import ml_dtypes
import numpy as np


class Format(NamedTuple):
    """unit: half the spacing over a number, at most; tiny: half the spacing of the subnormal numbers."""

    dtype: type
    largest: float
    unit: float
    tiny: float


def _format(dtype: type) -> Format:
    of = ml_dtypes.finfo(dtype)
    return Format(dtype, float(of.max), float(of.eps) / 2, float(of.smallest_subnormal) / 2)


E4M3, E5M2 = _format(ml_dtypes.float8_e4m3fn), _format(ml_dtypes.float8_e5m2)


def rounded(x: np.ndarray, to: Format) -> np.ndarray:
    """Each number's nearest in the format, in float64; for all beyond the largest, that."""
    return np.clip(x, -to.largest, to.largest).astype(to.dtype).astype(np.float64)


def scale_of(x: np.ndarray, to: Format) -> np.float32:
    """Such that the largest magnitude becomes the format's largest number, in fp32."""
    return np.float32(np.abs(x).max()) / np.float32(to.largest)


def through(x: np.ndarray, to: Format, scale: np.float32 | None = None) -> np.ndarray:
    """Returns x after the format: rounded(x / scale) · scale, the division in fp32, in float64."""
    scale = scale_of(x, to) if scale is None else scale
    return rounded(x.astype(np.float32) / scale, to) * np.float64(scale)
