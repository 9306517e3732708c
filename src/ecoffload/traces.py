"""Access traces: files in which one row is one lookup of an encoder output.

Reads CSV and JSON lines, gzipped or not, into plain arrays; ``replay`` and ``sizing`` play them. It opens files only
to read, and knows no cache.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ecoffload.errors import ConfigError

__all__ = ["TOKEN_BYTES", "Columns", "Trace", "read_trace"]

TOKEN_BYTES = 3584 * 2
"""Of one token: Qwen2-VL-7B's hidden size in bfloat16."""

_KEY_NAMES = ("key", "obj", "object", "object_id", "obj_id", "mm_hash", "hash", "image", "id")
_TOKENS_NAMES = ("tokens", "num_tokens", "n_tokens")
_BYTES_NAMES = ("bytes", "nbytes", "size", "size_bytes")
_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of the columns to read; None: the first of the usual names that is there. Bytes go before tokens."""

    key: str | None = None
    tokens: str | None = None
    bytes: str | None = None


@dataclass(frozen=True)
class Trace:
    """Lookups in order. ``objects``: int64 (n,), each row's object as a number from 0 up in order of appearance;
    ``sizes``: int64 (number of objects,), bytes of each object.

    A key stands for content, so an object has one size: that of its first row.
    """

    name: str
    objects: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.objects)

    @cached_property
    def nbytes(self) -> NDArray[np.int64]:
        """Bytes of each row's object, int64 (n,)."""
        return self.sizes[self.objects]

    @property
    def footprint(self) -> int:
        """Bytes of all distinct objects: what an infinite cache would hold."""
        return int(self.sizes.sum())

    @property
    def total_bytes(self) -> int:
        """Bytes asked for by all rows."""
        return int(self.nbytes.sum())

    def head(self, rows: int) -> Trace:
        """The first ``rows`` lookups, as a trace of their own."""
        objects = self.objects[:rows]
        return Trace(self.name, objects, self.sizes[: int(objects.max()) + 1])


def read_trace(path: str | Path, *, columns: Columns | None = None, token_bytes: int = TOKEN_BYTES) -> Trace:
    """Read a trace; what it is (gzip, JSON lines, CSV with a header) is seen from its bytes, not from its name.

    A row's size is its bytes column, or its tokens times ``token_bytes``. Raises :class:`ConfigError` for a file that
    cannot be read, has no such columns, or has a row without a key or a size above zero; it names file and line.
    """
    path = Path(path)
    columns = columns or Columns()
    if token_bytes < 1:
        raise ConfigError(f"token_bytes is {token_bytes}; it must be above zero", option="token_bytes")
    numbers: dict[Any, int] = {}
    objects: list[int] = []
    sizes: list[int] = []
    try:
        with _text(path) as lines:
            start = lines.read(4096).lstrip()[:1]
            if not start:
                raise ConfigError(f"trace {str(path)!r} is empty", option="trace", value=str(path))
            if start == "[":
                raise ConfigError(
                    f"trace {str(path)!r} is a JSON array; write one object a line, as jq -c '.[]' does",
                    option="trace",
                    value=str(path),
                )
            lines.seek(0)
            rows = _json_rows(path, lines, columns) if start == "{" else _csv_rows(path, lines, columns)
            for line, key, amount, is_bytes in rows:
                size = _whole(amount) * (1 if is_bytes else token_bytes)
                if not 0 < size < _MOST or key is None or key == "":
                    what = "bytes" if is_bytes else "tokens"
                    raise ConfigError(
                        f"{path}, line {line}: key {key!r} with {what} {amount!r}; each row needs a key and a whole "
                        f"number of {what} above zero",
                        option="trace",
                        value=str(path),
                    )
                number = numbers.setdefault(key, len(sizes))
                if number == len(sizes):
                    sizes.append(size)
                objects.append(number)
    except (EOFError, gzip.BadGzipFile, zlib.error) as exc:
        raise ConfigError(
            f"trace {str(path)!r} is a damaged or incomplete gzip file: {exc}", option="trace", value=str(path)
        ) from exc
    except io.UnsupportedOperation as exc:
        raise ConfigError(
            f"trace {str(path)!r} is a pipe or the like; a trace is read twice, so write it to a file first",
            option="trace",
            value=str(path),
        ) from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"trace {str(path)!r} is neither text nor gzip ({exc}); a trace is CSV with a header or JSON lines",
            option="trace",
            value=str(path),
        ) from exc
    except (OSError, csv.Error) as exc:
        raise ConfigError(f"trace {str(path)!r} cannot be read: {exc}", option="trace", value=str(path)) from exc
    if not objects:
        raise ConfigError(f"trace {str(path)!r} has no rows", option="trace", value=str(path))
    trace = Trace(path.name.split(".")[0], np.array(objects, np.int64), np.array(sizes, np.int64))
    if trace.nbytes.sum(dtype=np.float64) >= _MOST:  # beyond which sums of int64 would wrap
        raise ConfigError(
            f"trace {str(path)!r} asks for 2**62 bytes or more in all; its largest object has {max(sizes)}: look at "
            "the column and at --token-bytes",
            option="trace",
            value=str(path),
        )
    return trace


def _whole(amount: Any) -> int:
    """The whole number that a row gives, as an int or as digits; 0 for anything else."""
    if isinstance(amount, bool) or not isinstance(amount, int | str):
        return 0
    try:
        return int(amount)
    except ValueError:
        return 0


_Row = tuple[int, Any, Any, bool]  # line, key, amount, whether the amount is bytes


def _text(path: Path) -> IO[str]:
    with path.open("rb") as raw:
        if not raw.seekable():
            raise io.UnsupportedOperation
        zipped = raw.read(2) == b"\x1f\x8b"
    opener: Any = gzip.open if zipped else open
    return io.TextIOWrapper(opener(path, "rb"), encoding="utf-8-sig", newline="")


def _csv_rows(path: Path, lines: IO[str], columns: Columns) -> Iterator[_Row]:
    reader = csv.reader(lines)
    header = next(filter(None, reader), [])
    key, amount, is_bytes = _choose(path, header, columns)
    key_at, amount_at = header.index(key), header.index(amount)
    for row in reader:
        if row:
            if len(row) <= max(key_at, amount_at):
                row = [*row, *[""] * len(header)]
            yield reader.line_num, row[key_at], row[amount_at], is_bytes


def _json_rows(path: Path, lines: IO[str], columns: Columns) -> Iterator[_Row]:
    chosen: tuple[str, str, bool] | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"{path}, line {number}: {exc}", option="trace", value=str(path)) from exc
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: not a JSON object", option="trace", value=str(path))
        key, amount, is_bytes = chosen = chosen or _choose(path, list(row), columns)
        found = row.get(key)
        is_key = isinstance(found, str | int) and not isinstance(found, bool)  # true would be the object 1
        yield number, found if is_key else None, row.get(amount), is_bytes


def _choose(path: Path, header: list[str], columns: Columns) -> tuple[str, str, bool]:
    """Names of the key's and the amount's column, and whether the amount is bytes."""

    def find(wanted: str | None, usual: tuple[str, ...]) -> str | None:
        if wanted is not None:
            return wanted if wanted in header else _missing(path, header, (wanted,))
        return next((name for name in usual if name in header), None)

    key = find(columns.key, _KEY_NAMES) or _missing(path, header, _KEY_NAMES)
    if columns.tokens is None and (name := find(columns.bytes, _BYTES_NAMES)):
        return key, name, True
    return key, find(columns.tokens, _TOKENS_NAMES) or _missing(path, header, _TOKENS_NAMES + _BYTES_NAMES), False


def _missing(path: Path, header: list[str], names: tuple[str, ...]) -> str:
    raise ConfigError(
        f"trace {str(path)!r} has no column {' or '.join(map(repr, names))}; it has {', '.join(header) or 'none'}: "
        "name the right ones with --key-column, --tokens-column or --bytes-column",
        option="columns",
        value=header,
    )
