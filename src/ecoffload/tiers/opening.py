"""From ``mooncake://host:port?option=value`` to a link: which class serves the scheme, and what the options mean.

A tier is found through the entry-point group ``ecoffload.tiers``, the built-in one like anybody's: the name is the
scheme, the value a :class:`RemoteTier`. Only the one that is asked for is imported.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import ValidationError

from ecoffload.errors import ConfigError, EcoffloadError, PluginError
from ecoffload.tiers.interface import RemoteTier
from ecoffload.tiers.link import TierLink
from ecoffload.tiers.options import TierOptions

__all__ = ["GROUP", "open_tier"]

GROUP = "ecoffload.tiers"


def open_tier(tier: str | RemoteTier, *, namespace: str) -> TierLink:
    """A link to the tier of that URL (or to that object), for entries of ``namespace``. Reaches for nothing yet.

    Raises :class:`ConfigError` for a wrong URL or no namespace, :class:`BackendUnavailable` where a package is missing,
    :class:`PluginError` for a third party's tier that does not load.
    """
    if not namespace:
        raise ConfigError(
            "a tier needs a namespace: whatever the bytes of an entry depend on (model, revision, dtype, processor), "
            "or two models would read each other's; pass namespace=...",
            option="namespace",
            value=namespace,
        )
    if isinstance(tier, RemoteTier):
        return TierLink(tier, namespace=namespace)
    try:
        url = urlsplit(tier)
        given = parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query))
    except (ValueError, AttributeError, TypeError) as exc:
        raise ConfigError(f"tier {tier!r} is no URL: {exc}", option="tier", value=tier) from exc
    if not url.scheme or url.path not in ("", "/") or url.fragment or "@" in url.netloc:
        raise ConfigError(f"tier {tier!r} is no URL like mooncake://host:port?option=value", option="tier", value=tier)
    options = dict(given)
    if len(options) != len(given):
        raise ConfigError(f"tier {tier!r} gives an option twice", option="tier", value=tier)
    mine = {name: options.pop(name) for name in TierOptions.model_fields if name in options}
    try:
        common = TierOptions.model_validate(mine)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise ConfigError(
            f"tier {tier!r}: {name}={mine[name]!r}: {first['msg']}", option=name, value=mine[name]
        ) from exc
    kind = _class_of(url.scheme)
    try:
        made = kind(url.netloc, options)
    except EcoffloadError:
        raise
    except (Exception, SystemExit) as exc:
        raise PluginError(
            f"the tier {url.scheme!r} of {kind.__module__}:{kind.__qualname__} cannot be made: {exc!r}; mend or "
            "uninstall its package",
            name=url.scheme,
        ) from exc
    return TierLink(made, common, namespace=namespace)


def _class_of(scheme: str) -> type[RemoteTier]:
    entries = importlib.metadata.entry_points(group=GROUP)
    mine = entries.select(name=scheme)
    if not mine:
        known = ", ".join(sorted(entries.names)) or "none (mooncake is missing too: install ecoffload again)"
        raise ConfigError(
            f"no installed package brings a tier for {scheme}://; known: {known}", option="tier", value=scheme
        )
    if len(mine) > 1:
        owners = ", ".join(sorted(f"{each.dist.name} ({each.value})" if each.dist else each.value for each in mine))
        raise PluginError(f"{scheme}:// is claimed by several packages: {owners}; uninstall all but one", name=scheme)
    (entry,) = mine
    try:
        found: Any = entry.load()
    except EcoffloadError:
        raise
    except (Exception, SystemExit) as exc:
        raise PluginError(f"the tier {scheme!r} of {entry.value!r} does not load: {exc!r}", name=scheme) from exc
    if not (isinstance(found, type) and issubclass(found, RemoteTier)):
        raise PluginError(f"the tier {scheme!r}: {entry.value!r} is no subclass of RemoteTier", name=scheme)
    if not isinstance(getattr(found, "scheme", None), str):
        raise PluginError(
            f"the tier {scheme!r}: {entry.value!r} names no scheme; write scheme = {scheme!r}", name=scheme
        )
    return found
