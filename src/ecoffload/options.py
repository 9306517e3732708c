"""Options as callers give them, checked once and in our words: flags, seconds, directories.

`EncoderCache` and `opening` call it before anything is made. It opens no file.
"""

from __future__ import annotations

import os
from pathlib import Path

from ecoffload.errors import ConfigError

__all__ = ["directory", "flag", "seconds", "text"]


def flag(option: str, value: object) -> bool:
    """A bool and nothing else: "off" and "no" are true. Raises :class:`ConfigError`."""
    if not isinstance(value, bool):
        raise ConfigError(f"{option} is {value!r}; write True or False", option=option, value=value)
    return value


def seconds(option: str, value: object) -> float:
    """A number from zero up; infinity is one. Raises :class:`ConfigError`."""
    try:
        found = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
    except OverflowError:  # an int beyond every float
        found = -1.0
    if not found >= 0:  # NaN included
        raise ConfigError(f"{option} is {value!r}; write seconds as a number from 0 up", option=option, value=value)
    return found


def directory(option: str, value: object) -> Path:
    """A path as str or os.PathLike. Raises :class:`ConfigError`; whether anything lies there is the caller's to see."""
    try:
        path = os.fspath(value)  # type: ignore[call-overload]
        if isinstance(path, str) and path and b"\0" not in os.fsencode(path):
            return Path(path)
    except (TypeError, UnicodeEncodeError):
        pass
    raise ConfigError(
        f"{option} is {value!r}; write a path as text, for example '/dev/shm'", option=option, value=value
    )


def text(option: str, value: object) -> str:
    """Text that has a UTF-8 form. Raises :class:`ConfigError`."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            pass
        else:
            return value
    raise ConfigError(f"{option} {value!r} must be text", option=option, value=value)
