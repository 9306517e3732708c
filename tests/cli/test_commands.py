"""Every command but `demo`: its JSON, its exit codes, and that it says what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest

from ecoffload.cli.app import app
from ecoffload.doctor import Check
from ecoffload.region import HostRegion
from ecoffload.registry import get_backend

Run = Callable[..., Any]
TRACES = Path(__file__).parent.parent / "data" / "traces"
COMMANDS = ["demo", "backends", "doctor", "bench", "tune", "regions", "replay", "size", "new-backend"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(
        "obj,tokens\n" + "".join(f"{number % 7 * (number % 3)},{4 + number % 7}\n" for number in range(200))
    )
    return path


def test_the_commands_are_those_that_are_documented(run: Run) -> None:
    assert [command.name or command.callback.__name__ for command in app.registered_commands] == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_names_the_command(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: ecoffload {command}" in " ".join(result.stdout.split())


def test_the_first_help_has_an_example_and_the_exit_codes(run: Run) -> None:
    words = " ".join(run("--help").stdout.split())
    assert "Example: ecoffload demo" in words
    assert "Exit codes: 0 ok, 1 a check failed, 2 bad input, 3 what was asked for is unavailable." in words


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_is_two(run: Run, command: str) -> None:
    result = run(command, "--frobnicate")
    assert result.exit_code == 2
    assert "frobnicate" in result.stderr


def test_without_typer_one_line_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['typer'] = None; from ecoffload.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "pip install 'ecoffload[cli]'" in done.stderr
    assert "pip install '.[cli]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_version_is_told_by_the_command_and_by_the_module(run: Run) -> None:
    from ecoffload import __version__

    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"ecoffload {__version__}\n")
    done = subprocess.run([sys.executable, "-m", "ecoffload", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == result.stdout


# --- backends, doctor, tune, new-backend


def test_backends_are_listed_as_records(run: Run) -> None:
    result = run("backends", "--json")
    assert result.exit_code == 0
    (cpu,) = [record for record in json.loads(result.stdout) if record["name"] == "cpu"]
    assert (cpu["status"], cpu["encoding"], cpu["device_type"]) == ("ok", "int64", "cpu")
    assert {kernel["address_dtype"] for kernel in cpu["kernels"]} <= {"int64", "uint64"}
    assert cpu["reason"] != ""


def test_backends_exits_zero_whatever_it_lists(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from ecoffload.registry import list_backends

    monkeypatch.setenv("ECOFFLOAD_ALLOW_BACKENDS", "nothing")
    list_backends(refresh=True)
    try:
        result = run("backends", "--json")
        assert result.exit_code == 0
        assert {record["status"] for record in json.loads(result.stdout)} == {"blocked"}
    finally:
        monkeypatch.delenv("ECOFFLOAD_ALLOW_BACKENDS")
        list_backends(refresh=True)


def test_backends_can_initialise_devices_in_a_child(run: Run) -> None:
    (cpu,) = [r for r in json.loads(run("backends", "--probe", "--json").stdout) if r["name"] == "cpu"]
    assert cpu["status"] == "ok"
    assert "answers" in cpu["reason"]


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_doctor_is_one_only_if_a_check_failed(run: Run, status: Any, code: int) -> None:
    checks = [Check("shm", "ok", "all well"), Check("torch", status, "so it is", "do something")]
    with patch("ecoffload.cli.doctor.run_checks", return_value=checks):
        as_json, as_text = run("doctor", "--json"), run("doctor")
    assert as_json.exit_code == as_text.exit_code == code
    assert json.loads(as_json.stdout)[1] == {
        "name": "torch",
        "status": status,
        "detail": "so it is",
        "remedy": "do something",
    }
    assert "remedy: do something" in as_text.stdout


def test_doctor_finds_the_backends_of_this_machine(run: Run) -> None:
    assert "backend cpu" in [check["name"] for check in json.loads(run("doctor", "--json").stdout)]


def test_a_backend_with_nothing_to_tune_is_three(run: Run) -> None:
    result = run("tune", "--backend", "cpu")
    assert result.exit_code == 3
    assert "nothing to tune" in result.stderr


def test_what_a_backend_measured_is_given_back(run: Run) -> None:
    class Tuning:
        spec: ClassVar = get_backend("cpu").spec

        def tune(self, progress: Callable[[str], None]) -> dict[str, Any]:
            progress("half way")
            return found

    found = {"file": "tuning.json", "tuning": {"h2d": {"sms": [[0, 2]]}}, "measured": {"h2d": 1.0}}

    with patch("ecoffload.cli.tune.get_backend", return_value=Tuning()):
        result, text = run("tune", "--json"), run("tune")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == found
    assert "half way" in result.stderr
    assert text.stdout == "file: tuning.json\ntuning h2d sms: [[0, 2]]\n"


def test_headings_are_whole_in_eighty_columns(
    run: Run, trace: Path, region_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    backends = run("backends").stdout
    replay = run("replay", trace).stdout
    with HostRegion.open(region_name, capacity=1 << 20, granule=4096, namespace="n"):
        regions, watch = run("regions", region_name).stdout, run("regions", region_name, "--watch", "--count", 1).stdout
    assert {"name", "status", "package", "encoding", "kernels"} <= set(backends.split())
    assert {"policy", "capacity", "Belady", "region", "evicted", "extents"} <= set(replay.split())
    assert {"region", "state", "size", "age", "entries", "processes", "namespace"} <= set(regions.split())
    assert {"live", "MiB"} <= set(regions.split())
    assert {"region", "state", "in", "use", "entries", "hit", "MB/s"} <= set(watch.split())
    assert max(len(line) for text in (replay, regions, watch) for line in text.splitlines()) <= 80
    assert any(line.startswith("cpu: ") for line in backends.splitlines())


def test_a_new_backend_is_written_and_its_path_printed(run: Run, tmp_path: Path) -> None:
    result = run("new-backend", "acme-npu", tmp_path / "made")
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / 'made'}\n"
    assert "--ecoffload-backend=acme-npu" in result.stderr
    assert (tmp_path / "made" / "src" / "ecoffload_acme_npu" / "backend.py").is_file()


@pytest.mark.parametrize("name", ["Acme NPU", "cpu", "9"])
def test_a_name_that_cannot_be_is_two(run: Run, tmp_path: Path, name: str) -> None:
    assert run("new-backend", name, tmp_path / "made").exit_code == 2
    assert not (tmp_path / "made").exists()


def test_a_folder_that_holds_something_is_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    assert run("new-backend", "acme-npu", tmp_path).exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# --- regions


@pytest.fixture
def region_name() -> str:
    return f"cli-{id(object()):x}"


def test_a_live_region_is_listed_with_its_processes(run: Run, region_name: str) -> None:
    import os

    with HostRegion.open(region_name, capacity=1 << 20, granule=4096, namespace="of a test"):
        result = run("regions", region_name, "--json")
        text = run("regions", region_name)
    (found,) = json.loads(result.stdout)
    assert (found["id"], found["state"], found["namespace"]) == (region_name, "live", "of a test")
    assert found["mappers"] == [os.getpid()]
    assert "live" in text.stdout


@pytest.mark.parametrize("id", ["vllm-50844cadde0b95ecd0a2d3b8-dp0", "x" * 64], ids=len)
def test_an_id_and_its_figures_are_whole_in_eighty_columns(
    run: Run, tmp_path: Path, id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from ecoffload.regions import RegionInfo

    monkeypatch.setenv("COLUMNS", "80")
    info = RegionInfo("path", id, "ownerless", 0, 132 << 10, 750.0, 740.0, "n" * 90, True, 123_456, ())
    found = [info, replace(info, state="unfinished")]
    with patch("ecoffload.cli.regions.list_regions", return_value=found):
        lines = run("regions", "--directory", tmp_path).stdout.splitlines()
    assert {"132 KiB", "12.5 min", "123456"} <= {cell for line in lines for cell in re.split(r" {2,}", line.strip())}
    assert sum(line.startswith(f"{id}: ownerless for 12.3 min; namespace n") for line in lines) == 2


def test_reclaim_leaves_a_live_region_and_takes_an_ownerless_one(run: Run, region_name: str) -> None:
    region = HostRegion.open(region_name, capacity=1 << 20, granule=4096, warm=True)
    try:
        assert json.loads(run("regions", region_name, "--reclaim", "--json").stdout) == []
        assert region.path.exists()
    finally:
        region.close()
    assert json.loads(run("regions", region_name, "--json").stdout)[0]["state"] == "ownerless"
    assert json.loads(run("regions", region_name, "--reclaim", "--after", "999", "--json").stdout) == []
    result = run("regions", region_name, "--reclaim", "--json")
    assert [info["id"] for info in json.loads(result.stdout)] == [region_name]
    assert "1 regions unlinked" in result.stderr
    assert not region.path.exists()


def test_watching_prints_one_json_document_a_look(run: Run, region_name: str) -> None:
    with HostRegion.open(region_name, capacity=1 << 20, granule=4096):
        result = run("regions", region_name, "--watch", "--count", 3, "--interval", 0.05, "--json")
        text = run("regions", region_name, "--watch", "--count", 1)
    assert [json.loads(line)[0]["id"] for line in result.stdout.splitlines()] == [region_name] * 3
    assert region_name in text.stdout


def test_a_region_that_is_not_there_is_bad_input_and_those_that_are_get_named(run: Run, region_name: str) -> None:
    with HostRegion.open(region_name, capacity=1 << 20, granule=4096):
        for command in (("regions", "nope"), ("regions", "nope", "--reclaim"), ("size", "--live", "nope")):
            result = run(*command)
            assert result.exit_code == 2
            assert "no region 'nope'" in result.stderr
            assert region_name in result.stderr


@pytest.mark.parametrize("options", [("--directory", "/nowhere"), ("no/id",), ("--interval", "0")])
def test_regions_refuses_what_it_cannot_look_at(run: Run, options: tuple[str, ...]) -> None:
    assert run("regions", *options).exit_code == 2


# --- replay and size


@pytest.mark.parametrize("name", [b"ecoffload.\x1b[31mred", b"ecoffload.two\nlines", b"ecoffload.\xff"])
def test_a_file_with_a_name_that_no_region_has_is_neither_shown_nor_taken(
    run: Run, tmp_path: Path, name: bytes
) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    path.write_text("somebody's")
    assert json.loads(run("regions", "--directory", tmp_path, "--json").stdout) == []
    assert json.loads(run("regions", "--directory", tmp_path, "--reclaim", "--json").stdout) == []
    assert path.read_text() == "somebody's"


@pytest.mark.parametrize(
    ("command", "missing"),
    [(("size", "TRACE", "--plot", "DIR/x.png"), "x.png"), (("new-backend", "acme", "TRACE/inside"), "inside")],
)
def test_a_file_that_cannot_be_used_is_said_in_one_line(
    run: Run, trace: Path, tmp_path: Path, command: tuple[str, ...], missing: str
) -> None:
    (tmp_path / "x.png").mkdir()
    got = run(*(word.replace("TRACE", str(trace)).replace("DIR", str(tmp_path)) for word in command))
    assert got.exit_code == 2
    assert re.fullmatch(rf"error: '.*{missing}' cannot be used: .*\n", got.stderr)


@pytest.mark.parametrize("as_json", [True, False])
def test_a_full_disk_behind_stdout_is_said_and_a_closed_stdout_is_no_fault(trace: Path, as_json: bool) -> None:
    command = [sys.executable, "-m", "ecoffload", "size", str(trace), *["--json"] * as_json]
    with Path("/dev/full").open("wb") as nowhere:
        full = subprocess.run(command, check=False, stdout=nowhere, stderr=subprocess.PIPE, text=True)
    assert full.returncode != 0
    assert "error: the output cannot be written: No space left on device" in full.stderr
    assert "Traceback" not in full.stderr
    shell = ["sh", "-c", '"$@" >&-', "sh", *command]
    closed = subprocess.run(shell, check=False, stderr=subprocess.PIPE, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_replay_gives_every_policy_and_capacity_as_documented(run: Run, trace: Path) -> None:
    result = run(
        "replay", trace, "--policy", "fifo", "--policy", "auto", "--capacity", "50%", "--capacity", "200KiB", "--json"
    )
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert list(document) == ["fifo", "auto"]
    assert list(document["auto"]) == ["50%", "200KiB"]
    names = {"object_hit", "byte_hit", "belady_byte_hit", "evictions", "extents_per_entry", "us_per_op"}
    assert names <= document["auto"]["50%"].keys()
    assert document["auto"]["200KiB"]["capacity_bytes"] == 200 << 10


def test_replay_reproduces_a_published_figure_from_the_shared_trace_as_it_is(run: Run) -> None:
    result = run("replay", TRACES / "b_shared.csv.gz", "--policy", "lru", "--capacity", "10%", "--json")
    assert json.loads(result.stdout)["lru"]["10%"]["byte_hit"] == pytest.approx(0.643, abs=0.003)


def test_replay_moves_real_bytes_when_asked(run: Run, trace: Path) -> None:
    result = run("replay", trace, "--policy", "lru", "--capacity", "50%", "--move", "--json")
    moved = json.loads(result.stdout)["lru"]["50%"]["moved"]
    assert (moved["backend"], moved["mismatched"]) == ("cpu", 0)
    assert moved["verified"] > 0
    assert "verified bit for bit" in " ".join(run("replay", trace, "--capacity", "50%", "--move").stdout.split())


def test_replay_is_one_if_moved_bytes_differ(run: Run, trace: Path) -> None:
    with patch("torch.equal", return_value=False):
        result = run("replay", trace, "--policy", "lru", "--capacity", "50%", "--move")
    assert result.exit_code == 1
    assert "differ" in result.stderr


def test_size_recommends_a_capacity_that_replay_confirms(run: Run) -> None:
    path = TRACES / "b_base.csv.gz"
    document = json.loads(run("size", path, "--json").stdout)
    advice = document["recommendation"]
    assert advice["share"] == 0.9
    replayed = run("replay", path, "--policy", "lru", "--capacity", advice["capacity_bytes"], "--json")
    (outcome,) = json.loads(replayed.stdout)["lru"].values()
    assert outcome["byte_hit"] == pytest.approx(0.9 * document["best_byte_hit"], abs=0.02)


def test_a_recommendation_in_words_is_a_size_that_can_be_pasted(run: Run) -> None:
    from ecoffload.sizes import parse_size

    words = run("size", TRACES / "b_base.csv.gz").stdout.splitlines()[-1].split()
    document = json.loads(run("size", TRACES / "b_base.csv.gz", "--json").stdout)
    needed = document["recommendation"]["capacity_bytes"]
    assert needed <= parse_size(words[0]) < needed + (1 << 20)


def test_a_trace_without_reuse_gets_no_recommendation(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "once.jsonl"
    path.write_text("".join(json.dumps({"key": f"k{n}", "bytes": 5000}) + "\n" for n in range(9)))
    assert json.loads(run("size", path, "--json").stdout)["recommendation"] is None
    assert "no cache of any size would help" in " ".join(run("size", path).stdout.split())


@pytest.mark.parametrize("command", ["replay", "size"])
def test_columns_and_rows_can_be_chosen(run: Run, tmp_path: Path, command: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text("who,len\n" + "a,9000\nb,8000\na,9000\n" * 5 + "broken,\n")
    assert run(command, path, "--json").exit_code == 2
    bad = run(command, path, "--key-column", "who", "--bytes-column", "len", "--json")
    assert bad.exit_code == 2
    assert "line 17" in bad.stderr


def test_only_the_first_rows_are_played_when_asked(run: Run, trace: Path) -> None:
    assert json.loads(run("size", trace, "--rows", "20", "--json").stdout)["lookups"] == 20


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
@pytest.mark.parametrize("command", ["replay", "size"])
def test_a_plot_is_written_beside_the_answer(run: Run, trace: Path, tmp_path: Path, command: str, suffix: str) -> None:
    picture = tmp_path / f"plot.{suffix}"
    result = run(command, trace, "--plot", picture, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    "options",
    [
        ("--policy", "clairvoyant"),
        ("--capacity", "0%"),
        ("--capacity", "1"),
        ("--token-bytes", "0"),
        ("--plot", "plot.docx"),
        ("--plot", "/nowhere/plot.png"),
        ("--move", "--backend", "nosuch"),
    ],
)
def test_replay_refuses_a_bad_value(run: Run, trace: Path, options: tuple[str, ...]) -> None:
    result = run("replay", trace, *options)
    assert result.exit_code == 2
    assert result.stderr != ""


@pytest.mark.parametrize("share", ["0", "1.5", "x"])
def test_size_refuses_a_share_that_is_none(run: Run, trace: Path, share: str) -> None:
    assert run("size", trace, "--share", share).exit_code == 2


def test_a_trace_that_is_not_there_is_two(run: Run, tmp_path: Path) -> None:
    result = run("size", tmp_path / "none.csv")
    assert result.exit_code == 2
    assert "none.csv" in result.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "neither text nor gzip"),
        (b"\x1f\x8bgarbage", "damaged or incomplete gzip"),
        ((TRACES / "b_base.csv.gz").read_bytes()[:3000], "damaged or incomplete gzip"),
    ],
    ids=["empty", "binary", "no gzip", "half a gzip"],
)
@pytest.mark.parametrize("command", ["size", "replay"])
def test_what_is_wrong_with_a_trace_is_said(run: Run, tmp_path: Path, command: str, content: bytes, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    result = run(command, path)
    assert result.exit_code == 2
    assert said in result.stderr


def test_defaults_are_shown_and_flags_take_no_value(run: Run) -> None:
    words = " ".join(run("replay", "--help").stdout.split())
    assert "[default: auto, lru]" in words
    assert "[default: 10%]" in words
    assert "--json <bool>" not in words


def test_without_matplotlib_one_line_says_how_to_get_it(run: Run, trace: Path, tmp_path: Path) -> None:
    with patch.dict(sys.modules, {"matplotlib.figure": None, "matplotlib.backends.backend_agg": None}):
        result = run("size", trace, "--plot", tmp_path / "plot.png")
    assert result.exit_code == 3
    assert "pip install 'ecoffload[plot]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1


# --- bench

SMALL = ("--total", "256KiB", "--sizes", "7KiB,64KiB", "--rounds", 1, "--entries", 3)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["bench", *map(str, SMALL), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_bench_measures_every_way_size_and_direction(measured: dict[str, Any]) -> None:
    assert [(row["direction"], row["block_bytes"]) for row in measured["rates"]] == [
        ("h2d", 7 << 10),
        ("h2d", 64 << 10),
        ("d2h", 7 << 10),
        ("d2h", 64 << 10),
    ]
    rates = [rate for row in measured["rates"] for rate in row["gb_per_s"].values()]
    assert all(rate > 0 for rate in [*rates, *measured["peak"].values()])
    assert set(measured["rates"][0]["gb_per_s"]) == {"ours", "loop", "pack"}
    for name in ("save", "load", "get_returns"):
        points = measured["latency"][name]
        assert 0 < points["p50_us"] <= points["p90_us"] <= points["p99_us"]
    assert measured["start_up"]["region_s"] > 0


def test_bench_on_a_device_with_memory_of_its_own_verifies_what_it_moves(run: Run) -> None:
    result = run("bench", "--backend", "sim-uint64", *SMALL, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["backend"] == "sim-uint64"


def test_bench_prints_tables_and_draws(run: Run, tmp_path: Path) -> None:
    result = run("bench", *SMALL, "--plot", tmp_path / "bench.png")
    assert result.exit_code == 0
    assert "h2d ours" in result.stdout
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_two_results_are_compared_figure_by_figure(run: Run, tmp_path: Path, measured: dict[str, Any]) -> None:
    faster = json.loads(json.dumps(measured))
    faster["peak"]["h2d"] *= 2
    faster["latency"]["load"]["p50_us"] /= 4
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(measured))
    b.write_text(json.dumps(faster))
    result = run("bench", "--compare", a, b, "--json")
    assert result.exit_code == 0
    ratios = {row["figure"]: row["ratio"] for row in json.loads(result.stdout)}
    assert ratios["h2d peak GB/s"] == pytest.approx(2)
    assert ratios["load p50_us"] == pytest.approx(4)
    assert ratios["d2h peak GB/s"] == pytest.approx(1)
    assert "2.00x" in run("bench", "--compare", a, b).stdout


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"peak": 1}', '{"peak": NaN}', "[" * 100_000])
def test_what_is_no_result_cannot_be_compared(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    result = run("bench", "--compare", path, path)
    assert result.exit_code == 2
    assert "ecoffload bench --json" in result.stderr or "cannot be read" in result.stderr


@pytest.mark.parametrize(
    "options", [("--sizes", "1GiB"), ("--sizes", "many"), ("--rounds", "0"), ("--backend", "nosuch"), ("--total", "-1")]
)
def test_bench_refuses_a_bad_value(run: Run, options: tuple[str, ...]) -> None:
    assert run("bench", *options).exit_code == 2
