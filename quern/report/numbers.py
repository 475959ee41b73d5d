"""Numbers as people read them. Decimal units throughout: 1 kB is 1,000 bytes."""


def number(value: float) -> str:
    """1234567 → 1,234,567; 0.123456 → 0.1235."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def human(value: float) -> str:
    """1234567 → 1.23M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def human_bytes(value: float) -> str:
    """Decimal units: 24,000,000 → 24 MB."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} bytes"


def human_flops(value: float) -> str:
    """4.7e14 → 471 TFLOP."""
    for size, unit in (
        (1e21, "ZFLOP"),
        (1e18, "EFLOP"),
        (1e15, "PFLOP"),
        (1e12, "TFLOP"),
        (1e9, "GFLOP"),
        (1e6, "MFLOP"),
    ):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f} FLOP"


def duration(seconds: float) -> str:
    """400 → 6 min 40 s."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def percent(share: float) -> str:
    """0.8333 → 83%; below 10% and close to 100% one decimal is kept."""
    value = 100 * share
    return f"{value:.1f}%" if 0 < abs(value) < 9.95 or 99 < value < 99.95 else f"{value:.0f}%"
