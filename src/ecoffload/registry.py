"""Which backends are installed, which can run here, and which one serves a device.

Discovery reads the entry points of the group ``ecoffload.backends`` one by one (pluggy's own loader stops at the first
broken one), never at import, and only as far as asked: naming a backend imports no other plugin. Every refusal is a
record with a reason. Nothing here falls back silently: a tie is an error, and a backend that failed raises with its
cause chained.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from ecoffload import hookspecs
from ecoffload.backend import Availability, BackendSpec, SwapBackend
from ecoffload.errors import (
    AmbiguousBackend,
    BackendUnavailable,
    ConfigError,
    EcoffloadError,
    PluginError,
    UnknownBackend,
)
from ecoffload.host_queue import BlockingBackend

if TYPE_CHECKING:
    import torch

__all__ = ["GROUP", "TEST_GROUP", "BackendRecord", "backend_for", "find_backend", "get_backend", "list_backends"]

GROUP = "ecoffload.backends"
TEST_GROUP = "ecoffload.test_backends"
"""Devices that exist for tests (simulated ones): never listed or chosen unless named."""

Status = Literal["ok", "unavailable", "failed", "incompatible", "duplicate", "blocked"]

_ANY = (Exception, SystemExit)  # a plugin that exits at import must not end the process that lists it

_log = logging.getLogger("ecoffload.registry")


@dataclass(frozen=True, slots=True)
class BackendRecord:
    """One installed plugin and its state.

    ``status``: "ok"; "unavailable" (the plugin is fine, its device or driver is not there); "failed" (it could not be
    loaded or declared nothing usable); "incompatible" (another hook-API number); "duplicate" (a name already taken);
    "blocked" (not in ECOFFLOAD_ALLOW_BACKENDS). ``reason`` says why in words, and ``error`` keeps the exception.
    """

    name: str
    distribution: str
    version: str
    status: Status
    reason: str
    spec: BackendSpec | None = field(default=None, compare=False)
    error: BaseException | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True)
class _Plugin:
    """An entry point, and its record once it has been looked at."""

    entry: importlib.metadata.EntryPoint
    testing: bool
    duplicate_of: str | None = None
    record: BackendRecord | None = None
    loading: bool = False

    @property
    def owner(self) -> tuple[str, str]:
        """Name and version of the distribution; one without metadata has neither."""
        dist = self.entry.dist
        return (dist.name or "unknown", dist.version or "0") if dist is not None else ("unknown", "0")


class _Registry:
    def __init__(self) -> None:
        # Re-entrant: a plugin may import ecoffload and list backends while it is being loaded.
        self.lock = threading.RLock()
        self.plugins: dict[str, _Plugin] | None = None
        self.duplicates: list[_Plugin] = []
        self.instances: dict[tuple[str, int, int], SwapBackend] = {}

    def discover(self, *, refresh: bool = False) -> dict[str, _Plugin]:
        with self.lock:
            if refresh:
                importlib.invalidate_caches()  # a package installed since this process started
            if self.plugins is None or refresh:
                self.plugins, self.duplicates = {}, []
                self._read(self.plugins)
            return self.plugins

    def _read(self, plugins: dict[str, _Plugin]) -> None:
        found = [_Plugin(entry, entry.group == TEST_GROUP) for entry in _entry_points()]
        # Sorted, so that which of two plugins with one name wins does not depend on the file system; the core's own
        # come first and cannot be replaced.
        found.sort(key=lambda p: (p.owner[0] != "ecoffload", p.testing, p.entry.name, p.owner[0], p.entry.value))
        for plugin in found:
            first = plugins.setdefault(plugin.entry.name, plugin)
            if first is not plugin:
                plugin.duplicate_of = first.owner[0]
                self.duplicates.append(plugin)

    def examine(self, plugin: _Plugin) -> BackendRecord:
        with self.lock:
            if plugin.loading:  # it lists backends while it is being loaded: no answer about itself, and no loop
                return BackendRecord(plugin.entry.name, *plugin.owner, "unavailable", "it is being loaded")
            if plugin.record is None:
                plugin.loading = True
                try:
                    plugin.record = _examine(plugin)
                finally:
                    plugin.loading = False
                _report(plugin.record)
            return plugin.record


_registry = _Registry()


def _after_fork() -> None:
    _registry.lock = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


def _entry_points() -> Iterator[importlib.metadata.EntryPoint]:
    """Ours, of every distribution on sys.path, the first of each name; one that cannot be read hides no other."""
    seen: set[str] = set()
    for dist in importlib.metadata.distributions():
        try:
            # Reading METADATA and parsing the entry points of everything installed would cost most of a discovery.
            if "ecoffload." not in (dist.read_text("entry_points.txt") or ""):
                continue
            name = dist.name or str(dist.locate_file(""))
            if name not in seen:
                seen.add(name)
                yield from [e for e in dist.entry_points if e.group in (GROUP, TEST_GROUP)]
        except Exception as exc:
            _log.warning("the entry points of a distribution at %s are unreadable: %r", dist.locate_file(""), exc)


def _report(record: BackendRecord) -> None:
    if record.status in ("failed", "incompatible", "duplicate"):
        _log.warning(
            "backend %s of %s %s is %s: %s",
            record.name,
            record.distribution,
            record.version,
            record.status,
            record.reason,
        )


def _allowed() -> set[str] | None:
    raw = os.environ.get("ECOFFLOAD_ALLOW_BACKENDS")
    return None if raw is None else {name.strip() for name in raw.split(",") if name.strip()}


def strict() -> bool:
    """Whether ECOFFLOAD_STRICT asks that a broken plugin is an error instead of a record."""
    return os.environ.get("ECOFFLOAD_STRICT", "") not in ("", "0")


def _examine(plugin: _Plugin) -> BackendRecord:
    """Import one plugin, read its number, call its hook, ask its class: each step can end in a record of its own."""
    entry = plugin.entry
    name, (distribution, version) = entry.name, plugin.owner

    def record(status: Status, reason: str, **more: Any) -> BackendRecord:
        return BackendRecord(name, distribution, version, status, reason, **more)

    if plugin.duplicate_of is not None:
        return record(
            "duplicate",
            f"the name {name!r} is taken by the distribution {plugin.duplicate_of!r}; uninstall one of the two",
        )
    allowed = _allowed()
    if allowed is not None and name not in allowed:
        return record("blocked", "not listed in ECOFFLOAD_ALLOW_BACKENDS")
    where = entry.value.partition(":")[0].strip()
    try:
        module = import_module(where)
        number = getattr(module, "ECOFFLOAD_HOOK_API", None)
    except _ANY as exc:
        # A plugin for a newer core may fail on names that this core lacks: its number is readable all the same.
        number = _number_in_source(where)
        if number is not None and number not in hookspecs.SERVED_HOOK_APIS:
            return record("incompatible", _other_number(number), error=exc)
        return record("failed", _import_reason(exc, where, distribution), error=exc)
    if number is None:
        return record("failed", f"module {where!r} has no ECOFFLOAD_HOOK_API; write ECOFFLOAD_HOOK_API = 1 in it")
    if isinstance(number, bool) or not isinstance(number, int) or number not in hookspecs.SERVED_HOOK_APIS:
        return record("incompatible", _other_number(number))
    try:
        target = entry.load()
    except _ANY as exc:
        return record("failed", f"its entry point {entry.value!r} leads nowhere: {exc}", error=exc)
    try:
        spec = _call_hook(target, entry)
    except _ANY as exc:
        return record("failed", f"its hook raised {type(exc).__name__}: {exc}", error=exc)
    if not isinstance(spec, BackendSpec):
        return record("failed", f"its hook returned {type(spec).__name__}, not an ecoffload.BackendSpec")
    if spec.name != name:
        return record("failed", f"entry point {name!r} declares a backend named {spec.name!r}; the two must agree")
    try:
        available = spec.load_class().availability()
    except PluginError as exc:
        return record("failed", str(exc), spec=spec, error=exc)
    except _ANY as exc:
        return record("failed", f"availability() raised {type(exc).__name__}: {exc}", spec=spec, error=exc)
    if not isinstance(available, Availability):
        kind = type(available).__name__
        return record("failed", f"availability() returned {kind}, not an ecoffload.Availability", spec=spec)
    return record("ok" if available else "unavailable", available.reason, spec=spec)


def _call_hook(target: Any, entry: importlib.metadata.EntryPoint) -> Any:
    """A manager a plugin: one that breaks half way leaves nothing behind in another's."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(target, name=entry.name)
    manager.check_pending()
    if not manager.hook.ecoffload_register_backend.get_hookimpls():
        raise PluginError(f"{entry.value!r} implements no ecoffload_register_backend; mark it @ecoffload.hookimpl")
    return manager.hook.ecoffload_register_backend()


def _other_number(number: object) -> str:
    served = " and ".join(map(str, hookspecs.SERVED_HOOK_APIS))
    newer = isinstance(number, int) and number > max(hookspecs.SERVED_HOOK_APIS)
    remedy = "upgrade ecoffload" if newer else "upgrade the plugin"
    return f"it speaks hook API {number!r}, this ecoffload serves {served}; {remedy}"


def _number_in_source(module: str) -> int | None:
    """The literal ``ECOFFLOAD_HOOK_API = N`` in a module that does not import."""
    try:
        path: Any = None
        origin: str | None = None
        parts = module.split(".")
        # Step by step, because find_spec() would import the parents, which may be what does not import.
        for i in range(len(parts)):
            name = ".".join(parts[: i + 1])
            specs = (finder.find_spec(name, path) for finder in sys.meta_path)
            spec = next(s for s in specs if s is not None)
            path, origin = spec.submodule_search_locations, spec.origin
        if origin is None:
            return None
        with open(origin, encoding="utf-8") as source:
            tree = ast.parse(source.read())
    except Exception:  # whatever is wrong with the module is reported by the import that failed
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        if "ECOFFLOAD_HOOK_API" in names and isinstance(node.value, ast.Constant) and type(node.value.value) is int:
            return node.value.value
    return None


def _import_reason(exc: BaseException, module: str, distribution: str) -> str:
    missing = exc.name if isinstance(exc, ModuleNotFoundError) else None
    if missing is not None and (module == missing or module.startswith(missing + ".")):
        return f"its module {module!r} is not there; reinstall it: pip install --force-reinstall {distribution}"
    if missing is not None:
        return f"it needs the package {missing!r}, which is not installed: pip install {missing.partition('.')[0]}"
    return f"importing {module!r} raised {type(exc).__name__}: {exc}"


def list_backends(*, refresh: bool = False) -> list[BackendRecord]:
    """One record an installed plugin, by name; initialises no device. ``refresh`` reads the entry points anew.

    With ECOFFLOAD_STRICT set, a failed or incompatible plugin raises :class:`PluginError` instead.
    """
    plugins = _registry.discover(refresh=refresh)
    found = [_registry.examine(p) for p in plugins.values() if not p.testing]
    found += [_registry.examine(p) for p in _registry.duplicates if not p.testing]
    if strict():
        for record in found:
            if record.status in ("failed", "incompatible", "duplicate"):
                raise _plugin_error(record)
    return sorted(found, key=lambda r: (r.name, r.status == "duplicate", r.distribution))


def _plugin_error(record: BackendRecord) -> PluginError:
    error = PluginError(
        f"backend {record.name!r} ({record.distribution} {record.version}) is {record.status}: {record.reason}",
        name=record.name,
        distribution=record.distribution,
    )
    error.__cause__ = record.error
    return error


def _usable(name: str) -> BackendRecord:
    plugins = _registry.discover()
    plugin = plugins.get(name)
    if plugin is None:
        known = sorted(n for n, p in plugins.items() if not p.testing)
        raise UnknownBackend(
            f"no installed package brings a backend {name!r}; installed: {', '.join(known) or 'none'}. "
            f"For NVIDIA, AMD and Intel: pip install 'ecoffload[cuda]', 'ecoffload[rocm]', 'ecoffload[xpu]'",
            name=name,
            known=known,
        )
    record = _registry.examine(plugin)
    if record.status == "unavailable":
        raise BackendUnavailable(
            f"backend {name!r} is installed but cannot be used here: {record.reason}", name=name, reason=record.reason
        )
    if record.status == "blocked":
        raise BackendUnavailable(f"backend {name!r} is blocked: {record.reason}", name=name, reason=record.reason)
    if record.status != "ok" or record.spec is None:
        raise _plugin_error(record)
    return record


def get_backend(name: str | None = None, *, device: str | torch.device | int | None = None) -> SwapBackend:
    """The backend of that name, for a device type, or the only accelerator's; one object a device and process.

    Order of choice: ``name``; ECOFFLOAD_BACKEND (where it serves the device's type); the backend of ``device``'s type;
    the only available accelerator. ``device`` is "cuda", "cuda:1", a torch.device or an index. Raises
    :class:`UnknownBackend`, :class:`BackendUnavailable`, :class:`AmbiguousBackend` or :class:`PluginError`.
    """
    kind, index = _parse_device(device)
    if name is None:
        name = _choose(kind)
    record = _usable(name)
    spec = record.spec
    if spec is None:  # _usable gives only records with a declaration
        raise _plugin_error(record)
    if kind is not None and kind not in (spec.device_type, spec.name):
        raise ConfigError(
            f"backend {name!r} serves devices of type {spec.device_type!r}, not {kind!r}; "
            f"leave one of the two out or name the one that belongs to the other",
            option="device",
            value=str(device),
        )
    return _instance(spec, index)


def _instance(spec: BackendSpec, index: int) -> SwapBackend:
    key = (spec.name, index, os.getpid() if not spec.capabilities.fork_safe else 0)
    with _registry.lock:
        found = _registry.instances.get(key)
        if found is not None:
            return found
        if any(k[:2] == key[:2] for k in _registry.instances) and not spec.capabilities.fork_safe:
            raise BackendUnavailable(
                f"backend {spec.name!r} was used before this process was forked, and its device does not survive a "
                f"fork; start workers with the 'spawn' method, or use the device only in the child",
                name=spec.name,
                reason="forked after use",
            )
        try:
            backend = spec.load_class()(spec, index)
        except EcoffloadError:
            raise
        except Exception as exc:
            raise BackendUnavailable(
                f"backend {spec.name!r} failed to start on device {index}: {exc!r}", name=spec.name, reason=repr(exc)
            ) from exc
        if spec.capabilities.submission == "blocking":
            backend = BlockingBackend(backend)
        _registry.instances[key] = backend
        return backend


def find_backend(backend: str | SwapBackend | None, *, device: str | torch.device | int | None = None) -> SwapBackend:
    """``backend`` itself, or what :func:`get_backend` finds under its name or for ``device``. Raises what that does."""
    if backend is None or isinstance(backend, str):
        return get_backend(backend, device=device)
    if not isinstance(backend, SwapBackend):
        raise ConfigError(
            f"backend {backend!r} is a {type(backend).__name__}; pass a backend's name, or what get_backend() gives",
            option="backend",
            value=backend,
        )
    return backend


def _parse_device(device: Any) -> tuple[str | None, int]:
    if device is None:
        return None, 0
    if isinstance(device, int) and not isinstance(device, bool):
        return None, device
    text = str(device)
    kind, _, index = text.partition(":")
    if not kind or (index and not index.isdecimal()) or text.endswith(":"):
        raise ConfigError(
            f"device {device!r} is no device name; write for example 'cuda' or 'cuda:1'", option="device", value=device
        )
    return kind, int(index or 0)


def _choose(kind: str | None) -> str:
    plugins = _registry.discover()
    wanted = os.environ.get("ECOFFLOAD_BACKEND")
    if wanted and (kind is None or _serves(wanted, kind)):
        return wanted
    if kind is not None and kind in plugins and _registry.examine(plugins[kind]).status == "ok" and _serves(kind, kind):
        return kind  # the usual case, where the backend is named after its device: no other plugin is imported
    # Not so on AMD's GPUs, which torch calls "cuda" too: there the backend of that name is the one that cannot run.
    records = [record for record in list_backends() if record.status != "duplicate"]
    if kind is not None:
        # One of the device's own name counts even where it could not say what it serves: it is what was asked for.
        return _only([r for r in records if kind == (r.spec.device_type if r.spec is not None else r.name)], kind)
    accelerators = [r for r in records if r.spec is not None and r.spec.device_type != "cpu" and not r.spec.test_only]
    ready = [r for r in accelerators if r.status == "ok"]
    if not ready:
        states = "; ".join(f"{r.name}: {r.reason}" for r in records if r.name != "cpu") or "none is installed"
        raise BackendUnavailable(
            f"no accelerator's backend can be used here ({states}). To work on the CPU, say so: backend 'cpu'",
            name=None,
            reason=states,
        )
    return _only(ready, None)


def _serves(name: str, kind: str) -> bool:
    spec = _usable(name).spec
    return spec is not None and kind in (spec.device_type, spec.name)


def _only(records: Iterable[BackendRecord], kind: str | None) -> str:
    records = list(records)
    ready = [r for r in records if r.status == "ok"]
    if not ready and len(records) > 1:
        states = "; ".join(f"{r.name}: {r.reason}" for r in records)
        raise BackendUnavailable(
            f"no backend for devices of type {kind!r} can be used here ({states})", name=None, reason=states
        )
    ready = ready or records
    names = sorted(r.name for r in ready)
    if len(names) == 1:
        return names[0]
    if not names:
        raise UnknownBackend(
            f"no installed package brings a backend for devices of type {kind!r}; "
            f"{_remedy(kind)}, or see 'ecoffload backends'",
            name=kind,
            known=sorted(_registry.discover()),
        )
    raise AmbiguousBackend(
        f"more than one backend could serve {kind or 'this machine'}: {', '.join(names)}; "
        f"name one, as an argument or in ECOFFLOAD_BACKEND",
        candidates=names,
    )


def _remedy(kind: str | None) -> str:
    """Which package would serve a device type, where that is known: torch calls AMD's devices "cuda"."""
    extras = {"cuda": "'ecoffload[cuda]' (NVIDIA) or 'ecoffload[rocm]' (AMD)", "hip": "'ecoffload[rocm]'"}
    extras |= {"rocm": "'ecoffload[rocm]'", "xpu": "'ecoffload[xpu]'"}
    return f"try pip install {extras[kind]}" if kind in extras else "install the package of the device's backend"


def backend_for(tensor: torch.Tensor) -> SwapBackend:
    """The backend of the device on which ``tensor`` lies."""
    return get_backend(device=tensor.device)
