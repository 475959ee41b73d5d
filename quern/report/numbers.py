"""Numbers as text for readers. Units are decimal: 1 kB is 1,000 bytes."""


def number(value: float) -> str:
    """1234567 → 1,234,567; 0.123456 → 0.1235."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def human(value: float) -> str:
    """1234567 → 1.23M."""
    return _scaled(value, ("T", "B", "M", "K")) or f"{value:.3g}"


def human_bytes(value: float) -> str:
    """24,000,000 → 24 MB."""
    return _scaled(value, (" TB", " GB", " MB", " kB")) or f"{value:.0f} bytes"


def human_flops(value: float) -> str:
    """4.7e14 → 470 TFLOP."""
    prefixes = "ZEPTGM"
    return _scaled(value, [f" {prefix}FLOP" for prefix in prefixes], smallest=1e6) or f"{value:,.0f} FLOP"


def duration(seconds: float) -> str:
    """400 → 6 min 40 s."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def percent(share: float) -> str:
    """0.8333 → 83%; one decimal below 10% and above 99%."""
    value = 100 * share
    return f"{value:.1f}%" if 0 < abs(value) < 9.95 or 99 < value < 99.95 else f"{value:.0f}%"


def _scaled(value: float, units: list[str] | tuple[str, ...], smallest: float = 1e3) -> str:
    """The value in the largest unit that fits (units: largest first, a factor of 1,000 apart); "" if none fits."""
    size = smallest * 1000 ** (len(units) - 1)
    for unit in units:
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
        size /= 1000
    return ""
