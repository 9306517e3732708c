"""`demo` on tiny pictures: what it prints, and what each exit code means."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

Run = Callable[..., Any]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    rng = np.random.default_rng(3)
    for name in ("a.png", "b.png"):
        Image.fromarray(rng.integers(0, 255, (56, 84, 3), dtype=np.uint8)).save(folder / name)
    return folder


def test_every_reload_is_verified_and_nothing_else_is_on_stdout(run: Run, pictures: Path) -> None:
    result = run("demo", "--images", pictures, "--turns", 2, "--capacity", "1MiB", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert [image["name"] for image in document["images"]] == ["a.png", "b.png"]
    totals = document["totals"]
    assert totals["verified"] == totals["reloaded"] == 1  # turn 1: a; turn 2: b, and a again
    assert totals["mismatched"] == 0
    assert 0 < totals["hit_rate"] < 1
    assert totals["bytes_saved"] > 0
    assert totals["bytes_loaded"] > 0


def test_a_text_file_among_pictures_is_named_and_the_rest_goes_on(run: Run, pictures: Path) -> None:
    (pictures / "notes.txt").write_text("no image")
    result = run("demo", "--images", pictures, "--turns", 2, "--json")
    assert result.exit_code == 2
    assert "notes.txt" in result.stderr
    assert json.loads(result.stdout)["skipped"] == ["notes.txt"]
    assert len(json.loads(result.stdout)["images"]) == 2


def test_a_folder_without_a_single_picture_is_bad_input(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    result = run("demo", "--images", tmp_path)
    assert result.exit_code == 2
    assert "notes.txt" in result.stderr
    assert "cut.png" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("images", ["missing", "empty"])
def test_a_folder_that_is_not_there_or_empty_is_bad_input(run: Run, tmp_path: Path, images: str) -> None:
    (tmp_path / "empty").mkdir()
    result = run("demo", "--images", tmp_path / images)
    assert result.exit_code == 2
    assert images in result.stderr


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--backend", "nosuch"), 2),
        (("--capacity", "many"), 2),
        (("--turns", "0"), 2),
        (("--turns", "x"), 2),
        (("--frobnicate",), 2),
    ],
)
def test_a_bad_value_or_option_is_two(run: Run, pictures: Path, options: tuple[str, ...], code: int) -> None:
    result = run("demo", "--images", pictures, *options)
    assert result.exit_code == code
    assert result.stderr != ""
    assert result.stdout == ""


def test_a_backend_whose_device_is_not_here_is_three(run: Run, pictures: Path) -> None:
    from ecoffload.registry import list_backends

    absent = next((r.name for r in list_backends() if r.status == "unavailable"), None)
    if absent is None:
        pytest.skip("every installed backend can run here")
    result = run("demo", "--images", pictures, "--backend", absent)
    assert result.exit_code == 3
    assert absent in result.stderr


def test_host_memory_that_is_not_there_is_three(run: Run, pictures: Path) -> None:
    result = run("demo", "--images", pictures, "--capacity", "500TiB")
    assert result.exit_code == 3
    assert "free" in result.stderr


def test_a_reload_that_differs_is_one(run: Run, pictures: Path) -> None:
    with patch("ecoffload.demo.conversation.torch.equal", return_value=False):
        result = run("demo", "--images", pictures, "--turns", 2, "--capacity", "1MiB")
    assert result.exit_code == 1
    assert "differ" in result.stderr


def test_without_the_extra_one_line_says_how_to_get_it(run: Run) -> None:
    import sys

    with patch.dict(sys.modules, {"ecoffload.demo.images": None, "ecoffload.demo.conversation": None}):
        result = run("demo")
    assert result.exit_code == 3
    assert "pip install 'ecoffload[demo]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1
