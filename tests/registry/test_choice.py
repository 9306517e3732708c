"""Choosing a backend: by argument, environment, device, or because it is the only one; never in silence."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ecoffload import (
    AmbiguousBackend,
    BackendUnavailable,
    ConfigError,
    DescriptorError,
    PluginError,
    UnknownBackend,
    backend_for,
    get_backend,
    list_backends,
)
from ecoffload.descriptors import AddressRanges, DescriptorPool

Install = Callable[..., Path]
ABSENT = "Availability(False, 'no /dev/acme0')"


def test_naming_a_backend_imports_no_other_plugin(healthy: Install) -> None:
    healthy("wanted", "wanted")
    healthy("other", "other")
    get_backend("wanted")
    assert "fake_wanted" in sys.modules
    assert "fake_other" not in sys.modules


def test_a_device_type_with_a_backend_of_its_name_imports_no_other_plugin(healthy: Install) -> None:
    healthy("acme", "acme")
    healthy("other", "other")
    assert get_backend(device="acme:0").spec.name == "acme"
    assert "fake_other" not in sys.modules


def test_the_argument_beats_the_environment(healthy: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy("one", "one")
    healthy("two", "two")
    monkeypatch.setenv("ECOFFLOAD_BACKEND", "two")
    assert get_backend("one").spec.name == "one"
    assert get_backend().spec.name == "two"


def test_the_environment_beats_the_device_where_it_serves_it(healthy: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy("acme", "acme")
    healthy("better", "acme")
    monkeypatch.setenv("ECOFFLOAD_BACKEND", "better")
    assert get_backend(device="acme").spec.name == "better"
    assert get_backend(device="cpu").spec.name == "cpu"


def test_f3_an_environment_that_names_a_missing_backend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOFFLOAD_BACKEND", "acme")
    with pytest.raises(UnknownBackend, match="acme"):
        get_backend()


def test_the_only_available_accelerator_is_chosen(healthy: Install) -> None:
    healthy("there", "there")
    healthy("absent", "absent", available=ABSENT)
    assert get_backend().spec.name == "there"


def test_two_available_accelerators_are_a_tie_that_names_both(healthy: Install) -> None:
    healthy("one", "one")
    healthy("two", "two")
    with pytest.raises(AmbiguousBackend, match="one, two") as caught:
        get_backend()
    assert caught.value.candidates == ["one", "two"]


@pytest.mark.parametrize("device_type", ["cpu", "acme"])
def test_f3_without_an_accelerator_there_is_no_silent_fall_back_to_the_cpu(device_type: str, healthy: Install) -> None:
    healthy("absent", "absent", available=ABSENT)
    if device_type == "cpu":
        healthy("toy", "cpu")
    with pytest.raises(BackendUnavailable, match="no /dev/acme0") as caught:
        get_backend()
    assert "'cpu'" in str(caught.value)


def test_f3_a_broken_backend_of_the_asked_device_raises_its_own_error(install: Install) -> None:
    install("acme", "raise ImportError('no driver bindings')")
    with pytest.raises(PluginError, match="no driver bindings") as caught:
        get_backend(device="acme")
    assert isinstance(caught.value.__cause__, ImportError)


def test_f3_a_broken_plugin_beside_the_only_accelerator_is_a_warning_or_in_strict_mode_an_error(
    install: Install, healthy: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    healthy("there", "there")
    install("broken", "raise ImportError('no driver bindings')")
    assert get_backend().spec.name == "there"
    assert "dist-broken 1.0 is failed" in caplog.text
    monkeypatch.setenv("ECOFFLOAD_STRICT", "1")
    with pytest.raises(PluginError, match="no driver bindings"):
        get_backend()
    assert get_backend("there").spec.name == "there"


def test_f3_an_absent_device_is_told_apart_from_an_absent_package(healthy: Install) -> None:
    healthy("acme", "acme", available=ABSENT)
    with pytest.raises(BackendUnavailable, match="installed but cannot be used here: no /dev/acme0"):
        get_backend("acme")
    with pytest.raises(UnknownBackend, match="no installed package"):
        get_backend("acme-2")
    with pytest.raises(UnknownBackend, match="npu"):
        get_backend(device="npu")


def test_f3_a_backend_that_fails_to_start_raises_with_its_cause(healthy: Install) -> None:
    healthy("acme", "acme")
    path = Path(sys.path[0]) / "fake_acme.py"
    path.write_text(path.read_text().replace("super().__init__(*args)", "raise OSError('bus error')"))
    with pytest.raises(BackendUnavailable, match="bus error") as caught:
        get_backend("acme")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_device_of_another_type_than_the_named_backends_is_refused() -> None:
    with pytest.raises(ConfigError, match="'cuda'"):
        get_backend("cpu", device="cuda:1")


def test_a_package_is_named_for_a_device_type_that_one_is_known_for() -> None:
    with pytest.raises(UnknownBackend) as caught:
        get_backend(device="banana")
    assert "pip install" not in str(caught.value)


@pytest.mark.parametrize("index", ["cpu:1", "cpu:3"])
def test_there_is_one_cpu(index: str) -> None:
    with pytest.raises(ConfigError, match=index):
        get_backend(device=index)


@pytest.mark.parametrize("device", ["cuda:", ":1", "cuda:one", ""])
def test_a_device_that_is_no_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError):
        get_backend(device=device)


def test_backend_for_asks_the_tensors_device() -> None:
    assert backend_for(torch.zeros(1)).spec.name == "cpu"


def test_only_allowed_entry_points_are_imported(healthy: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy("allowed", "allowed")
    healthy("other", "other")
    monkeypatch.setenv("ECOFFLOAD_ALLOW_BACKENDS", " allowed , cpu ")
    states = {record.name: record.status for record in list_backends()}
    assert states == {"allowed": "ok", "cpu": "ok", "other": "blocked"}
    assert "fake_other" not in sys.modules
    with pytest.raises(BackendUnavailable, match="ECOFFLOAD_ALLOW_BACKENDS"):
        get_backend("other")


def test_an_empty_list_allows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOFFLOAD_ALLOW_BACKENDS", "")
    assert {record.status for record in list_backends()} == {"blocked"}


def test_listing_makes_no_backend(healthy: Install) -> None:
    healthy("acme")
    list_backends()
    assert sys.modules["fake_acme"].Backend.made == 0
    get_backend("acme")
    get_backend("acme", device=0)
    assert sys.modules["fake_acme"].Backend.made == 1
    get_backend("acme", device="acme:1")
    assert sys.modules["fake_acme"].Backend.made == 2


# --- F8: an accelerator in a package of its own overrides three seams and nothing else


def test_f8_three_methods_and_a_declaration_are_a_whole_backend(healthy: Install) -> None:
    healthy("acme", "cpu")
    path = Path(sys.path[0]) / "fake_acme.py"
    code = path.read_text().replace(
        "    def submit", "    def register(self, a, n): return super().register(a, n)\n    def submit"
    )
    path.write_text(code + "    def close(self): pass\n")
    backend = get_backend("acme")
    own = {name for name in vars(type(backend)) if not name.startswith("_")} - {"made"}
    assert own == {"availability", "register", "submit", "close"}
    assert backend.limits("d2h").max_descriptors is None
    assert backend.ops.empty(3).numel() == 3


# --- F9: importing and listing touch no device; forks; shapes of descriptor arrays; containment

FORK = """
    import os, sys
    import ecoffload

    def child(work):
        pid = os.fork()
        if pid == 0:
            try:
                work()
            except BaseException as exc:
                print(type(exc).__name__, exc, flush=True)
                os._exit(1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert "torch" not in sys.modules
    ecoffload.list_backends()
    assert child(lambda: ecoffload.get_backend("sim-int64")) == 0
    ecoffload.get_backend("cpu")
    assert child(lambda: ecoffload.get_backend("cpu")) == 0
    ecoffload.get_backend("sim-int64")
    assert child(lambda: ecoffload.get_backend("sim-int64")) == 1
"""


def test_f9_a_device_used_before_a_fork_is_refused_in_the_child_and_a_listed_one_is_not() -> None:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORK)], check=False, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "BackendUnavailable" in result.stdout
    assert "spawn" in result.stdout


def test_f9_a_descriptor_one_byte_past_its_region_is_named() -> None:
    batch = DescriptorPool().lease()
    batch.extend([0x1000, 0x1FF9], [0x9000, 0x9008], [8, 8])
    with pytest.raises(DescriptorError, match="ends 1 bytes past") as caught:
        batch.check(AddressRanges([(0x1000, 0x1000)]), None)
    assert caught.value.index == 1


@pytest.mark.parametrize(
    "columns",
    [
        (np.zeros((3, 2), np.uint64), np.zeros(3, np.uint64), np.ones(3, np.uint64)),
        (np.zeros(3), np.zeros(3, np.uint64), np.ones(3, np.uint64)),
        (np.zeros(3, np.uint64), np.zeros(2, np.uint64), np.ones(3, np.uint64)),
    ],
    ids=["two-dimensional", "float", "lengths"],
)
def test_f9_tables_of_another_shape_or_dtype_are_refused_and_add_nothing(columns: Any) -> None:
    batch = DescriptorPool().lease()
    with pytest.raises(ValueError, match=r"1-D|float64"):
        batch.extend(*columns)
    assert batch.count == 0


def test_f9_strided_tables_are_read_by_value() -> None:
    batch = DescriptorPool().lease()
    table = np.arange(1, 7, dtype=np.uint64).reshape(3, 2)
    batch.extend(table[:, 0], table[:, 1], 1)
    batch.check(AddressRanges([(1, 5)]), AddressRanges([(2, 5)]))
    assert batch.count == 3
