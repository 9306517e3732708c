"""How a URL finds its tier: through entry points, a third party's package like the one that is built in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ecoffload import BackendUnavailable, ConfigError, PluginError
from ecoffload.tiers import open_tier

Package = Callable[..., None]

THIRD_PARTY = """
from ecoffload.tiers import RemoteTier

class Shelf(RemoteTier):
    scheme = "shelf"
    def connect(self, memory): ...
    def publish(self, objects): return []
    def exists(self, names): return []
    def fetch_many(self, objects): return []
    def close(self): ...
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """`package(name, scheme, code)`: as if a distribution of that name had been installed."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, scheme: str = "shelf", code: str = THIRD_PARTY, value: str = "Shelf") -> None:
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[ecoffload.tiers]\n{scheme} = {module}:{value}\n")

    return install


def test_a_third_partys_tier_is_found_and_gets_address_and_options(package: Package) -> None:
    package("acme-shelf-one")
    link = open_tier("shelf://host:9?wait=0.5", namespace="model")
    assert type(link.tier).__name__ == "Shelf"
    assert link.tier.address == "host:9"
    assert link.options.wait == 0.5


def test_an_option_that_neither_link_nor_tier_knows_is_refused(package: Package) -> None:
    package("acme-shelf-two")
    with pytest.raises(ConfigError, match="shelf: unknown option 'colour'"):
        open_tier("shelf://host:9?colour=red", namespace="model")


def test_a_scheme_that_two_packages_claim_is_an_error_that_names_both(package: Package) -> None:
    package("acme-shelf-three")
    package("other-shelf")
    with pytest.raises(PluginError, match=r"acme-shelf-three .*, other-shelf .*uninstall all but one"):
        open_tier("shelf://host:9", namespace="model")


def test_the_built_in_scheme_cannot_be_taken_over(package: Package) -> None:
    package("evil-mooncake", scheme="mooncake")
    with pytest.raises(PluginError, match=r"ecoffload \(ecoffload.tiers.mooncake:MooncakeTier\), evil-mooncake"):
        open_tier("mooncake://host:9", namespace="model")


def test_a_scheme_that_nobody_brings_lists_what_is_there(package: Package) -> None:
    package("acme-shelf-four")
    with pytest.raises(ConfigError, match=r"no installed package brings a tier for box://; known: mooncake, shelf"):
        open_tier("box://host:9", namespace="model")


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("acme-broken", "import no_such_module", "no_such_module"),
        ("acme-plain", "class Shelf: ...", "no subclass"),
        ("acme-leaving", "raise SystemExit(3)", "does not load: SystemExit"),
        ("acme-nameless", THIRD_PARTY.replace('scheme = "shelf"', "..."), "names no scheme; write scheme = 'shelf'"),
        ("acme-half", THIRD_PARTY.replace("def close", "def open"), "cannot be made: TypeError.*uninstall its package"),
        (
            "acme-failing",
            THIRD_PARTY + "    def __init__(self, address, options): raise SystemExit(4)",
            "cannot be made: SystemExit",
        ),
    ],
)
def test_a_package_whose_tier_cannot_be_used_is_an_error_of_ours_that_says_why(
    package: Package, name: str, code: str, reason: str
) -> None:
    package(name, code=code)
    with pytest.raises(PluginError, match=reason):
        open_tier("shelf://host:9", namespace="model")


def test_other_packages_are_not_imported_for_a_scheme(package: Package) -> None:
    package("acme-shelf-five")
    package("acme-explosive", scheme="boom", code="raise SystemExit('imported')")
    assert open_tier("shelf://host:9", namespace="model").tier.scheme == "shelf"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("mooncake", "no URL"),
        ("mooncake://host:1/path", "no URL"),
        ("mooncake://user@host:1", "no URL"),
        ("mooncake://host:1?wait=-1", "wait"),
        ("mooncake://host:1?wait=1&wait=2", "twice"),
        ("mooncake://host:1?deadline", "no URL"),
        ("mooncake://host:1?deadline=inf", "deadline='inf'"),  # a frozen store would keep requests for ever
        ("mooncake://host:1?wait=1e400", "wait='1e400'"),
        ([], "no URL"),
    ],
)
def test_a_wrong_url_is_an_error_at_the_start(url: Any, reason: str) -> None:
    with pytest.raises((ConfigError, BackendUnavailable), match=reason):
        open_tier(url, namespace="model")
