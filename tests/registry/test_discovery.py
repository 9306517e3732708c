"""Discovery: one record a plugin, whatever it does, and nothing that one plugin does touches another's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pluggy
import pytest

from ecoffload import BackendRecord, PluginError, get_backend, hookspecs, list_backends
from ecoffload import registry as registry_module
from ecoffload.registry import TEST_GROUP

Install = Callable[..., Path]
OK_HEAD = "ECOFFLOAD_HOOK_API = 1\nfrom ecoffload import hookimpl\n"
HOOK = OK_HEAD + "@hookimpl\ndef ecoffload_register_backend():\n    "


def records() -> dict[str, BackendRecord]:
    return {record.name: record for record in list_backends()}


BROKEN: dict[str, tuple[str, str, str]] = {
    "import-error": ("raise ImportError('no driver bindings')", "failed", "no driver bindings"),
    "other-error": ("1 / 0", "failed", "ZeroDivisionError"),
    "exits": ("import sys; sys.exit(3)", "failed", "SystemExit"),
    "syntax": ("def", "failed", "SyntaxError"),
    "needs-package": ("import acme_runtime.queue", "failed", "pip install acme_runtime"),
    "no-number": ("from ecoffload import hookimpl", "failed", "ECOFFLOAD_HOOK_API"),
    "wrong-type": (HOOK + "return {'name': 'wrong-type'}", "failed", "returned dict"),
    "nothing": (HOOK + "return None", "failed", "NoneType"),
    "raises": (HOOK + "raise OSError('no such bus')", "failed", "no such bus"),
    "quits": (HOOK + "raise SystemExit('bye')", "failed", "bye"),
    "bad-spec": (
        "from ecoffload import BackendSpec\n" + HOOK + "return BackendSpec(name='bad-spec', colour='red')",
        "failed",
        "colour",
    ),
    "no-hook": (OK_HEAD, "failed", "implements no ecoffload_register_backend"),
    "misspelt": (OK_HEAD + "@hookimpl\ndef ecoffload_register_backends(): pass", "failed", "backends"),
    "future": ("ECOFFLOAD_HOOK_API = 99", "incompatible", "upgrade ecoffload"),
    "past": ("ECOFFLOAD_HOOK_API = 0", "incompatible", "upgrade the plugin"),
    "text-number": ("ECOFFLOAD_HOOK_API = '1'", "incompatible", "'1'"),
    "true-number": ("ECOFFLOAD_HOOK_API = True", "incompatible", "True"),
    "future-names": (
        "from ecoffload import SomethingOfTheNextMajor\nECOFFLOAD_HOOK_API: int = 99\n",
        "incompatible",
        "99",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_f3_f5_a_broken_plugin_changes_nothing_but_its_own_record(
    name: str, install: Install, healthy: Install
) -> None:
    healthy("good", "good")
    healthy("zz-good", "zz")
    before = records()
    code, status, reason = BROKEN[name]
    install(name, code)
    after = {record.name: record for record in list_backends(refresh=True)}
    broken = after.pop(name)
    assert (broken.status, broken.distribution, broken.version) == (status, f"dist-{name}", "1.0")
    assert reason in broken.reason
    assert after == before
    assert {record.status for record in after.values()} == {"ok"}


@pytest.mark.parametrize("name", [n for n in BROKEN if n not in ("no-number", "wrong-type", "nothing")])
def test_f3_a_broken_plugin_that_was_named_raises_with_its_cause(name: str, install: Install) -> None:
    install(name, BROKEN[name][0])
    with pytest.raises(PluginError, match=f"dist-{name}") as caught:
        get_backend(name)
    if BROKEN[name][1] == "failed":
        assert caught.value.__cause__ is not None
    assert (caught.value.name, caught.value.distribution) == (name, f"dist-{name}")


def test_f3_a_broken_plugin_that_nobody_asked_for_is_a_warning_with_distribution_and_cause(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("broken", "raise ImportError('no driver bindings')")
    with caplog.at_level(logging.WARNING, "ecoffload.registry"):
        list_backends()
        list_backends()
    (message,) = [r.getMessage() for r in caplog.records if "broken" in r.getMessage()]
    assert "dist-broken 1.0" in message
    assert "no driver bindings" in message


def test_f3_an_entry_point_without_its_attribute_says_where_it_leads(install: Install) -> None:
    install("lost", "ECOFFLOAD_HOOK_API = 1", value="fake_lost:plugin")
    assert records()["lost"].status == "failed"
    assert "'fake_lost:plugin' leads nowhere" in records()["lost"].reason


def test_f3_a_plugin_whose_module_is_gone_says_how_to_reinstall_it(install: Install) -> None:
    install("gone", "", value="fake_not_there.plugin")
    record = records()["gone"]
    assert record.status == "failed"
    assert "pip install --force-reinstall dist-gone" in record.reason


def test_f3_an_entry_point_that_is_no_name_is_a_record_too(install: Install) -> None:
    install("odd", "", value="not a module!!")
    assert records()["odd"].status == "failed"


@pytest.mark.parametrize("answer", ["True", "None", "'there'"])
def test_f3_availability_of_the_wrong_type_is_a_failure(answer: str, healthy: Install) -> None:
    healthy("vague", available=answer)
    assert records()["vague"].status == "failed"
    assert "not an ecoffload.Availability" in records()["vague"].reason


def test_f3_availability_that_raises_is_a_failure_with_its_cause(healthy: Install) -> None:
    healthy("shaky", available="1 / 0")
    assert isinstance(records()["shaky"].error, ZeroDivisionError)


def test_f3_a_factory_that_is_no_backend_is_a_failure(install: Install) -> None:
    code = (
        "from ecoffload import BackendSpec, KernelSpec, PointerEncoding\n"
        + HOOK
        + "return BackendSpec(name='cls', device_type='x', encoding=PointerEncoding.INT64,"
        " kernels=(KernelSpec(name='k', address_dtype='int64'),), factory='pathlib:Path')"
    )
    install("cls", code)
    assert records()["cls"].status == "failed"
    assert "not a subclass of ecoffload.SwapBackend" in records()["cls"].reason


def test_f5_two_plugins_of_one_name_leave_the_first_in_place_and_record_the_second(healthy: Install) -> None:
    healthy("first", entry="acme", distribution="aaa-dist")
    healthy("second", entry="acme", distribution="bbb-dist")
    both = [record for record in list_backends() if record.name == "acme"]
    assert [(record.status, record.distribution) for record in both] == [("ok", "aaa-dist"), ("duplicate", "bbb-dist")]
    assert "aaa-dist" in both[1].reason
    assert type(get_backend("acme")).__module__ == "fake_first"


@pytest.mark.parametrize("taken", ["cpu", "sim-uint64"])
def test_f5_nobody_replaces_a_backend_of_the_cores_own(taken: str, healthy: Install) -> None:
    healthy("thief", entry=taken, distribution="aaa-dist")
    assert type(get_backend(taken)).__module__.startswith("ecoffload.")
    (record,) = [r for r in list_backends() if r.distribution == "aaa-dist"]
    assert record.status == "duplicate"


def test_f5_one_module_under_two_names_serves_the_one_that_it_declares(install: Install, healthy: Install) -> None:
    healthy("acme")
    info = Path(sys.path[0]) / "dist_acme-1.0.dist-info" / "entry_points.txt"
    info.write_text(info.read_text() + "other = fake_acme\n")
    found = records()
    assert found["acme"].status == "ok"
    assert found["other"].status == "failed"
    assert "declares a backend named 'acme'" in found["other"].reason


def test_f5_a_distribution_seen_twice_on_the_path_counts_once(
    healthy: Install, tmp_path: Path, monkeypatch: Any
) -> None:
    info = healthy("acme")
    stale = tmp_path / "stale" / info.name
    stale.mkdir(parents=True)
    for file in info.iterdir():
        (stale / file.name).write_text(file.read_text().replace("fake_acme", "fake_long_gone"))
    monkeypatch.syspath_prepend(tmp_path)
    sys.path.insert(1, str(stale.parent))
    assert [record.status for record in list_backends() if record.name == "acme"] == ["ok"]


def test_f5_metadata_without_a_name_or_with_unreadable_entry_points_hide_no_other(
    install: Install, healthy: Install, tmp_path: Path
) -> None:
    healthy("good")
    install("nameless", BROKEN["future"][0], metadata=False)
    for name, text in (("bad", "[ecoffload.backends]\nno equals sign\n"), ("binary", "\x00\x01 ecoffload. \x02")):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(text)
    found = records()
    assert found["good"].status == "ok"
    assert found["nameless"].status == "incompatible"


def test_f5_strict_turns_a_broken_plugin_into_an_error(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("broken", "raise ImportError('no driver bindings')")
    monkeypatch.setenv("ECOFFLOAD_STRICT", "1")
    with pytest.raises(PluginError, match=r"dist-broken 1\.0") as caught:
        list_backends()
    assert isinstance(caught.value.__cause__, ImportError)
    monkeypatch.setenv("ECOFFLOAD_STRICT", "0")
    assert records()["broken"].status == "failed"


def test_the_number_of_a_plugin_whose_package_does_not_import_is_read_from_its_source(
    install: Install, tmp_path: Path
) -> None:
    package = tmp_path / "fake_package"
    package.mkdir()
    (package / "__init__.py").write_text("from ecoffload import SomethingOfTheNextMajor\n")
    (package / "plugin.py").write_text("ECOFFLOAD_HOOK_API = 7\n")
    install("deep", "", value="fake_package.plugin")
    assert records()["deep"].status == "incompatible"
    assert "upgrade ecoffload" in records()["deep"].reason


def test_a_plugin_for_another_number_never_has_its_hook_called(install: Install) -> None:
    install("future", HOOK.replace("= 1", "= 2") + "raise AssertionError('called')")
    record = records()["future"]
    assert record.status == "incompatible"
    assert record.error is None


@pytest.mark.parametrize("where", ["import", "hook"])
def test_discovery_survives_a_plugin_that_imports_ecoffload_and_lists_backends(
    where: str, install: Install, healthy: Install, caplog: pytest.LogCaptureFixture
) -> None:
    healthy("other")
    source = Path(sys.path[0]) / "fake_curious.py"
    healthy("curious")
    look = "import ecoffload\nSEEN = {r.name: r.status for r in ecoffload.list_backends()}\n"
    if where == "import":
        source.write_text(look + source.read_text())
    else:
        body = (
            "    global SEEN\n    import ecoffload\n    SEEN = {r.name: r.status for r in ecoffload.list_backends()}\n"
        )
        head = "def ecoffload_register_backend():\n"
        source.write_text(source.read_text().replace(head, head + body))
    found = records()
    assert found["curious"].status == found["other"].status == found["cpu"].status == "ok"
    assert sys.modules["fake_curious"].SEEN["other"] == "ok"
    assert not caplog.records


def test_a_package_installed_since_is_found_by_a_refresh(healthy: Install) -> None:
    assert "late" not in records()
    healthy("late")
    assert "late" not in records()
    assert "late" in {record.name for record in list_backends(refresh=True)}


def test_test_devices_are_not_listed(healthy: Install) -> None:
    healthy("probe-only", group=TEST_GROUP)
    assert not {"probe-only", "sim-int64", "sim-uint64", "sim-top"} & set(records())
    assert get_backend("probe-only").spec.name == "probe-only"


def test_every_hook_is_documented_and_begins_with_our_name() -> None:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    hooks = [name for name in vars(manager.hook) if not name.startswith("_")]
    assert hooks == ["ecoffload_register_backend"]
    for name in hooks:
        assert name.startswith("ecoffload_")
        assert (getattr(hookspecs, name).__doc__ or "").strip(), f"{name} has no documentation"


def test_the_current_number_is_served() -> None:
    assert hookspecs.ECOFFLOAD_HOOK_API in hookspecs.SERVED_HOOK_APIS
    assert len(hookspecs.SERVED_HOOK_APIS) <= 2


def test_the_registry_keeps_the_exception_for_those_who_want_it(install: Install) -> None:
    install("broken", "raise ImportError('no driver bindings')")
    assert isinstance(records()["broken"].error, ImportError)
    assert registry_module.strict() is False
