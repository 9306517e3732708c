"""Reading traces: formats seen from the bytes, columns found or named, and what is wrong said with file and line."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from ecoffload.errors import ConfigError
from ecoffload.traces import TOKEN_BYTES, Columns, read_trace

TRACES = Path(__file__).parent.parent / "data" / "traces"


def written(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "rows", "first"), [("mc_conv_seg", 37454, 512), ("b_base", 50423, 221), ("b_shared", 51197, 221)]
)
def test_the_shared_traces_are_read_as_they_are(name: str, rows: int, first: int) -> None:
    trace = read_trace(TRACES / f"{name}.csv.gz")
    assert len(trace) == rows
    assert trace.name == name
    assert trace.nbytes[0] == first * TOKEN_BYTES


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "oddly.named"])
def test_csv_is_known_by_its_bytes(tmp_path: Path, name: str) -> None:
    trace = read_trace(written(tmp_path, "t_s,obj,tokens\n1,a,2\n2,b,3\n3,a,2\n", name), token_bytes=10)
    assert trace.objects.tolist() == [0, 1, 0]
    assert trace.sizes.tolist() == [20, 30]
    assert (trace.footprint, trace.total_bytes) == (50, 70)


@pytest.mark.parametrize("text", ["\n\nobj,tokens\na,2\n", '\n {"obj": "a", "tokens": 2}\n'])
def test_blank_lines_before_the_first_are_passed_over(tmp_path: Path, text: str) -> None:
    assert read_trace(written(tmp_path, text), token_bytes=10).sizes.tolist() == [20]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_json_lines_are_known_by_their_bytes(tmp_path: Path, name: str) -> None:
    rows = [{"mm_hash": "x", "nbytes": 7}, {"mm_hash": "y", "nbytes": 5}, {"mm_hash": "x", "nbytes": 7}]
    trace = read_trace(written(tmp_path, "\n".join(map(json.dumps, rows)) + "\n\n", name))
    assert trace.objects.tolist() == [0, 1, 0]
    assert trace.sizes.tolist() == [7, 5]


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_name(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "\ufeffkey,bytes\r\na,1\r\nb,2\r\n"))
    assert trace.sizes.tolist() == [1, 2]


def test_columns_can_be_named(tmp_path: Path) -> None:
    path = written(tmp_path, "obj,who,tokens,len\n1,a,5,9\n1,b,5,9\n")
    assert read_trace(path, columns=Columns(key="who", bytes="len")).sizes.tolist() == [9, 9]
    assert read_trace(path, columns=Columns(key="who", tokens="len"), token_bytes=2).sizes.tolist() == [18, 18]


def test_an_object_keeps_the_size_of_its_first_row(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, "obj,bytes\na,5\na,6\n")).nbytes.tolist() == [5, 5]


def test_the_head_of_a_trace_is_a_trace_of_its_own(tmp_path: Path) -> None:
    head = read_trace(written(tmp_path, "obj,bytes\na,5\nb,6\na,5\nc,7\n")).head(3)
    assert (len(head), head.footprint) == (3, 11)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ('[{"obj": 1, "tokens": 2}]', "JSON array; write one object a line"),
        ("obj,tokens\n", "has no rows"),
        ("a,b\n1,2\n", r"it has a, b: name the right ones with --key-column"),
        ("obj\n1\n", "'tokens'"),
        ("obj,tokens\na,1\nb,x\n", "line 3.*'x'"),
        ("obj,tokens\na,0\n", "line 2.*above zero"),
        ("obj,tokens\na,-4\n", "line 2"),
        ("obj,tokens\na\n", "line 2"),
        ("obj,tokens\n,4\n", "line 2.*key ''"),
        ('{"obj": 1, "tokens": 2}\n[1]\n', "line 2: not a JSON object"),
        ('{"obj": 1, "tokens": 2}\n{"obj"\n', "line 2"),
        ('{"obj": 1, "tokens": 2}\n{"obj": [1], "tokens": 2}\n', "line 2.*key None"),
        ('{"obj": 1, "tokens": 2}\n{"obj": 1}\n', "line 2.*None"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(written(tmp_path, text))


def test_a_file_that_is_not_there_or_cut_short_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    path = tmp_path / "cut.csv.gz"
    path.write_bytes((TRACES / "b_shared.csv.gz").read_bytes()[:20_000])
    with pytest.raises(ConfigError, match="damaged or incomplete gzip"):
        read_trace(path)
    path.write_bytes(b"\xff\xfe\x00obj")
    with pytest.raises(ConfigError, match="neither text nor gzip"):
        read_trace(path)


def test_a_missing_named_column_is_said_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no column 'who'; it has obj, tokens"):
        read_trace(written(tmp_path, "obj,tokens\n1,2\n"), columns=Columns(key="who"))


@pytest.mark.parametrize(
    "row",
    ['{"key":"a","bytes":1e999}', '{"key":"a","bytes":1.9}', '{"key":true,"bytes":5}', '{"key":"a","bytes":true}'],
)
def test_a_size_or_key_that_only_looks_like_one_is_refused(tmp_path: Path, row: str) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(ConfigError, match="whole number"):
        read_trace(path)


def test_a_trace_whose_bytes_no_sum_could_hold_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "key,bytes\n" + "".join(f"k{each},{1 << 61}\n" for each in range(16)))
    with pytest.raises(ConfigError, match=r"asks for 2\*\*62 bytes or more in all"):
        read_trace(path)


def test_a_pipe_is_no_trace_and_the_remedy_is_said(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"key,bytes\na,1\n")
    os.close(writer)
    try:
        with pytest.raises(ConfigError, match=r"is a pipe or the like; .* write it to a file first"):
            read_trace(f"/dev/fd/{reader}")
    finally:
        os.close(reader)
