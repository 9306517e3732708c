"""Sizes as people write them: "512MiB", "2GiB", "1.5GB", or a plain number of bytes."""

from __future__ import annotations

import re
from fractions import Fraction

from ecoffload.errors import ConfigError

__all__ = ["format_size", "parse_size"]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}IB"] = 1 << (10 * _power)  # binary suffixes mean powers of 1024 ...
    _UNITS[f"{_letter}B"] = 1000**_power  # ... decimal ones powers of 1000
_PATTERN = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([KMGTP]?i?B|)\s*", re.IGNORECASE | re.ASCII)


def parse_size(value: int | str, *, option: str = "size") -> int:
    """Bytes of ``value``: an int of bytes, or a number with a suffix: B, KiB..PiB (powers of 1024), kB..PB (of 1000).

    Raises :class:`ConfigError` for anything else, for zero, negative sizes and fractions of a byte.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        match = _PATTERN.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ConfigError(
                f"{option} {value!r} is no size; write bytes as an int, or for example '512MiB', '2GiB' or '1.5GB'",
                option=option,
                value=value,
            )
        exact = Fraction(match[1]) * _UNITS[match[2].upper()]
        if exact.denominator != 1:
            raise ConfigError(f"{option} {value!r} is not a whole number of bytes", option=option, value=value)
        nbytes = int(exact)
    if nbytes <= 0:
        raise ConfigError(f"{option} {value!r} must be above zero", option=option, value=value)
    return nbytes


def format_size(nbytes: float) -> str:
    """For people: binary units, three digits."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" or abs(amount) >= 100 else f"{amount:.3g} {unit}"
