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
    assert result.stderr.count("notes.txt") == 1
    assert json.loads(result.stdout)["skipped"] == ["notes.txt"]
    assert len(json.loads(result.stdout)["images"]) == 2


def test_pictures_with_the_same_pixels_share_one_encoding(run: Run, pictures: Path) -> None:
    (pictures / "a copy.png").write_bytes((pictures / "a.png").read_bytes())
    result = run("demo", "--images", pictures, "--turns", 3, "--capacity", "1MiB", "--json")
    assert result.exit_code == 0
    copy, a, b = json.loads(result.stdout)["images"]
    assert [image["same_as"] for image in (copy, a, b)] == [None, "a copy.png", None]
    assert (a["encoded"], a["reloaded"], a["verified"]) == (0, 2, 2)  # of its turn, and of the one after it
    assert copy["encoded"] == b["encoded"] == 1
    totals = json.loads(result.stdout)["totals"]
    assert totals["footprint_bytes"] == 2 * 20480  # of two encodings: 6 tokens of 3072 bytes, in pages of 4096
    words = run("demo", "--images", pictures, "--turns", 3, "--capacity", "1MiB").stdout
    assert "a.png has the same pixels as a copy.png" in words


def test_the_same_patches_in_another_grid_are_another_picture(run: Run, tmp_path: Path) -> None:
    for name, size in (("tall.png", (28, 56)), ("wide.png", (56, 28))):
        Image.new("RGB", size, "teal").save(tmp_path / name)
    result = run("demo", "--images", tmp_path, "--turns", 2, "--capacity", "1MiB", "--json")
    assert result.exit_code == 0
    assert [image["encoded"] for image in json.loads(result.stdout)["images"]] == [1, 1]


def test_the_default_capacity_reloads_and_verifies_even_with_few_pictures(run: Run, pictures: Path) -> None:
    result = run("demo", "--images", pictures, "--turns", 2, "--json")
    assert json.loads(result.stdout)["totals"]["verified"] == 1


def test_a_conversation_that_reloads_nothing_says_so(run: Run, pictures: Path) -> None:
    words = run("demo", "--images", pictures, "--turns", 1).stdout
    assert "nothing was reloaded, so nothing was verified" in words
    assert "; 1 turn\n" in words
    assert "GB/s" not in words
    totals = json.loads(run("demo", "--images", pictures, "--turns", 1, "--json").stdout)["totals"]
    assert totals["reload_gb_per_s"] is None


def test_a_capacity_that_holds_no_picture_is_bad_input(run: Run, pictures: Path) -> None:
    result = run("demo", "--images", pictures, "--capacity", "10KB")
    assert result.exit_code == 2
    assert "holds no picture: the smallest encoding takes 20 KiB" in result.stderr
    assert result.stdout == ""


def test_names_are_printed_as_they_are_and_leave_the_other_columns_room(run: Run, pictures: Path) -> None:
    picture = (pictures / "a.png").read_bytes()
    for name in ("x [bold]y :smile:.png", "n" * 200 + ".png"):
        (pictures / name).write_bytes(picture)
    words = run("demo", "--images", pictures, "--turns", 2).stdout
    assert "x [bold]y :smile:.png" in words
    rows = [line for line in words.splitlines() if line.startswith(" nnn")]
    assert len(rows) == 1
    assert "n.png" in rows[0]
    assert "18 KiB" in rows[0]  # 6 tokens of 3072 bytes
    assert "reloaded" in words


def test_what_is_wrong_with_a_file_is_said(run: Run, pictures: Path) -> None:
    whole = (pictures / "a.png").read_bytes()
    (pictures / "empty.png").touch()
    (pictures / "cut.png").write_bytes(whole[: len(whole) // 2])
    Image.open(pictures / "a.png").save(pictures / "whole.jpg")
    whole = (pictures / "whole.jpg").read_bytes()
    (pictures / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (pictures / "start.jpg").write_bytes(whole[:40])
    result = run("demo", "--images", pictures, "--turns", 2, "--json")
    assert result.exit_code == 2
    assert "empty.png is empty" in result.stderr
    assert "cut.png is a damaged image, perhaps cut short" in result.stderr
    assert "cut.jpg is a damaged image, perhaps cut short" in result.stderr
    assert "start.jpg cannot be read" in result.stderr
    assert len(json.loads(result.stdout)["images"]) == 3


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
