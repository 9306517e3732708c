"""What a user may write into `ec_connector_extra_config`, which vLLM this works with, and what came of both.

Every wrong option is a `ConfigError` at start-up that names the remedy. The effective configuration is logged once a
process and role, and can be asked for. Both halves of the connector read this; it imports neither vLLM nor torch.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ecoffload.errors import ConfigError
from ecoffload.sizes import format_size, parse_size
from ecoffload.tiers.opening import open_tier

__all__ = ["GRANULE", "Options", "announce", "check_version", "effective_configuration", "log", "read_options"]

log = logging.getLogger("vllm.ecoffload")
"""vLLM's handlers belong to loggers below "vllm": what is said here shows up in its log."""

GRANULE = 4096
TRIED = ((0, 30), (0, 33))
"""First and last vLLM whose scheduler runs in this project's tests."""
_WHERE = "ec_connector_extra_config"


class Options(BaseModel):
    """The connector's options; all but `ec_cpu_bytes` have defaults.

    * `ec_cpu_bytes`: host memory, bytes or a size such as "8GiB"; for each data-parallel rank.
    * `enabled`: False leaves the connector in place and does nothing.
    * `backend`: a backend's name; default: the one that serves the engine's device.
    * `policy`: which entry goes first when room is needed.
    * `directory`: the tmpfs or hugetlbfs that holds the region. `name`: tells two engines of one model apart that run
      on one host with `warm`.
    * `register`: "require", "prefer" or "off": DMA-able host memory.
    * `checksum`: an entry counts only once a checksum over its bytes was taken.
    * `warm`: keep entries over a restart of the engine. `trust_uuids`: also those under a client's own `uuid`.
    * `reclaim_after`: seconds after which another namespace's ownerless region may go. `scrub_on_close`: overwrite the
      region at the end.
    * `weight_epoch`: part of the namespace; change it when weights change in a way that no file tells.
      `weight_epoch_file`: touch this file when weights were updated in place: everything is forgotten.
    * `tier`: URL of a store that other machines share, such as "mooncake://host:port?wait=0.25": what is encoded here
      is published there, and what the region lacks is fetched. A request waits `wait` seconds at most for what is on
      its way. Needs a network on which everybody is trusted.
    * `encode_us_per_token`: what encoding costs here; statistics then tell the time saved.
    * `timeout`: seconds to wait for another process that creates the region. `stall_after`: seconds without progress
      after which transfers are given up and the cache is turned off.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    ec_cpu_bytes: int
    enabled: bool = True
    backend: str | None = None
    policy: Literal["auto", "lru", "fifo", "s3-fifo", "gdsf"] = "auto"
    directory: str = "/dev/shm"
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_-]{0,24}$")
    register_: Literal["require", "prefer", "off"] = Field(default="prefer", alias="register")
    checksum: bool = False
    warm: bool = False
    trust_uuids: bool = False
    reclaim_after: float = Field(default=3600.0, ge=0)
    scrub_on_close: bool = False
    weight_epoch: int | str = ""
    weight_epoch_file: str | None = None
    tier: str | None = None
    encode_us_per_token: float | None = Field(default=None, gt=0)
    timeout: float = Field(default=60.0, gt=0)
    stall_after: float = Field(default=60.0, gt=0)

    @field_validator("ec_cpu_bytes", mode="before")
    @classmethod
    def _size(cls, value: Any) -> int:
        return parse_size(value, option="ec_cpu_bytes")


def _names() -> list[str]:
    return [field.alias or name for name, field in Options.model_fields.items()]


def read_options(extra: dict[str, Any]) -> Options:
    """The options in `ec_connector_extra_config`. Raises ConfigError for an unknown, missing or wrong one."""
    known = _names()
    for key in extra:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{_WHERE}: unknown option {key!r}; {hint}", option=key, value=extra[key])
    if extra.get("ec_cpu_bytes") is None:
        raise ConfigError(
            f'{_WHERE}: ec_cpu_bytes is missing; give the host memory for encoder outputs, e.g. "ec_cpu_bytes": "8GiB"',
            option="ec_cpu_bytes",
            value=None,
        )
    try:
        options = Options.model_validate(extra)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = ".".join(str(part) for part in first["loc"][:1])
        value = extra.get(option)
        raise ConfigError(
            f"{_WHERE}: {option} is {value!r}: {first['msg'][:1].lower()}{first['msg'][1:]}", option=option, value=value
        ) from error
    if options.scrub_on_close and options.warm:
        raise ConfigError(
            f"{_WHERE}: scrub_on_close and warm contradict each other; leave one out",
            option="scrub_on_close",
            value=True,
        )
    if options.tier is not None:
        open_tier(options.tier, namespace=_WHERE)  # reaches for nothing: only whether it could be
    return options


def check_capacity(options: Options, row_bytes: int, largest: int) -> str:
    """Refuse a region that cannot hold one row; return a warning if it cannot hold the largest item (both in bytes)."""
    least = -(-max(row_bytes, 1) // GRANULE) * GRANULE
    if options.ec_cpu_bytes < least:
        raise ConfigError(
            f"{_WHERE}: ec_cpu_bytes is {options.ec_cpu_bytes}; the minimum is {least} bytes (one token of this "
            f"model), and {largest} hold its largest input",
            option="ec_cpu_bytes",
            value=options.ec_cpu_bytes,
            minimum=least,
        )
    if options.ec_cpu_bytes < largest:
        return (
            f"ec_cpu_bytes is {format_size(options.ec_cpu_bytes)}: an input may need up to {format_size(largest)}, and "
            "larger ones than the region are never kept"
        )
    return ""


def check_version(version: str) -> str:
    """What to say about this vLLM: "" for one that was tried, else a warning. Raises ConfigError for one too old."""
    tried = f"{TRIED[0][0]}.{TRIED[0][1]} to {TRIED[1][0]}.{TRIED[1][1]}"
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or version.startswith("0.0."):
        return f"vLLM {version!r} names no release; ecoffload was tried with {tried}"
    number = int(match[1]), int(match[2])
    if number < TRIED[0]:
        raise ConfigError(
            f"vLLM {version} is too old for EcoffloadConnector: it lacks hooks that came with 0.30. "
            f"Install vLLM {tried}, or leave ec_connector out",
            option="vllm",
            value=version,
        )
    if number > TRIED[1]:
        return f"vLLM {version} is newer than what ecoffload was tried with ({tried}); look out for an upgrade"
    return ""


_effective: dict[tuple[int, str], dict[str, Any]] = {}


def announce(role: str, settings: dict[str, Any]) -> None:
    """Keep what is in force for `role` in this process, and log it if that has not been done."""
    key = os.getpid(), role
    fresh = key not in _effective
    _effective[key] = settings
    if fresh:
        log.info("ecoffload %s: %s", role, ", ".join(f"{name}={value}" for name, value in settings.items()))


def effective_configuration() -> dict[str, dict[str, Any]]:
    """By role ("scheduler", "worker 0", ...): what is in force in this process, as plain data."""
    return {role: dict(settings) for (pid, role), settings in _effective.items() if pid == os.getpid()}
