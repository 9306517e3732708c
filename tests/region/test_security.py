"""What others may plant where a region should be: refused with the path and the reason, never followed. (D8)"""

from __future__ import annotations

import os
import shutil
import struct
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ecoffload import layout
from ecoffload.errors import ConfigError, RegionError
from ecoffload.region import HostRegion
from ecoffload.regions import PREFIX, list_regions, reclaim

MIB = 1 << 20
ROOT = os.geteuid() == 0


def open_region(shm: Path, id: str = "a", **options: Any) -> HostRegion:
    options = {"capacity": MIB, "granule": 4096, "directory": shm, "timeout": 0.3} | options
    return HostRegion.open(id, **options)


@pytest.mark.parametrize(
    "id", ["", ".", "..", "a/b", "../a", "/etc/passwd", "-a", "a b", "a\0b", "a\n", "ä", "a" * 65, 7]
)
def test_d8_an_id_that_is_no_plain_name_is_refused(shm: Path, id: Any) -> None:
    with pytest.raises(ConfigError, match="region id"):
        open_region(shm, id)
    assert list(shm.iterdir()) == []


def test_d8_a_planted_symbolic_link_is_never_followed(shm: Path, tmp_path: Path) -> None:
    target = shm / "target"
    target.write_bytes(b"precious")
    (shm / "ecoffload.a").symlink_to(target)
    for create in (True, False):
        with pytest.raises(RegionError, match="symbolic link"):
            open_region(shm, create=create)
    assert target.read_bytes() == b"precious"
    (shm / "ecoffload.b").symlink_to(shm / "nowhere")
    with pytest.raises(RegionError, match="symbolic link"):
        open_region(shm, "b")
    assert not (shm / "nowhere").exists()


def test_d8_a_planted_fifo_or_directory_does_not_hang(shm: Path) -> None:
    os.mkfifo(shm / "ecoffload.a", 0o600)
    with pytest.raises(RegionError, match="no regular file"):
        open_region(shm)
    (shm / "ecoffload.b").mkdir()
    with pytest.raises(RegionError, match=r"ecoffload\.b: Is a directory"):
        open_region(shm, "b")


def test_d8_a_file_that_others_may_open_is_refused(shm: Path) -> None:
    path = shm / "ecoffload.a"
    path.touch()
    path.chmod(0o640)
    with pytest.raises(RegionError, match="its mode is 0640"):
        open_region(shm)


def test_d8_a_hard_link_is_refused(shm: Path) -> None:
    (shm / "other").touch(0o600)
    (shm / "ecoffload.a").hardlink_to(shm / "other")
    with pytest.raises(RegionError, match="second name"):
        open_region(shm)


@pytest.mark.skipif(not ROOT, reason="giving a file to another user needs root")
def test_d8_another_users_file_is_refused_with_both_uids(shm: Path) -> None:
    path = shm / "ecoffload.a"
    path.touch(0o600)
    os.chown(path, 12345, 12345)
    with pytest.raises(RegionError, match=r"belongs to uid 12345, and this process runs as uid 0"):
        open_region(shm)
    assert list_regions(shm)[0].state == "foreign"
    assert reclaim(shm) == []
    assert path.exists()


@pytest.mark.skipif(not ROOT, reason="running as another user needs root")
def test_d8_a_file_that_the_system_keeps_from_us_is_named_with_its_owner(shm: Path, child: Callable[..., Any]) -> None:
    shm.chmod(0o755)
    with open_region(shm):
        code = """
            os.setuid(12345)
            from ecoffload.errors import RegionError
            from ecoffload.regions import list_regions
            for id in ("a", "b"):
                try: HostRegion.open(id, capacity=1 << 20, granule=4096, directory=args[0], timeout=0.3)
                except RegionError as error: say(error)
            say(list_regions(args[0])[0].state)
        """
        # -c code imports before it changes its user: the package may lie where that user cannot read.
        status, out, err = child(
            "import ecoffload.opening, ecoffload.regions, ecoffload.errors\n" + textwrap.dedent(code), shm
        ).end()
    assert (status, err) == (0, "")
    taken, closed, state = out.splitlines()
    assert "belongs to uid 0, and this process runs as uid 12345" in taken
    assert f"uid 12345 may not create files in {shm} (uid 0, mode 0755)" in closed
    assert state == "foreign"


def test_descriptors_are_not_inherited_by_programs(shm: Path) -> None:
    with open_region(shm) as region:
        region.claim_slot(0)
        for fd in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue
            assert not (target == str(region.path) and os.get_inheritable(int(fd)))


# --- nothing in the file is trusted ---------------------------------------------------------------------------------

edits = st.lists(st.tuples(st.integers(0, 4095), st.binary(min_size=1, max_size=16)), min_size=1, max_size=4)
words = st.one_of(st.integers(0, 3), st.integers(2**64 - 3, 2**64 - 1), st.integers(0, 2**64 - 1))


def good_header() -> layout.Header:
    return layout.plan(
        capacity=MIB, granule=4096, page=4096, chunk_bytes=64 << 20, slots=64,
        warm=True, scrub=False, namespace="n", incarnation=99,
    )  # fmt: skip


@settings(deadline=None)
@given(page=st.binary(max_size=4096))
def test_random_bytes_are_no_header(page: bytes) -> None:
    assert layout.parse(page) is None
    assert not layout.is_ready(page)


@settings(deadline=None)
@given(edits=edits)
def test_a_header_with_a_changed_byte_is_no_header(edits: list[tuple[int, bytes]]) -> None:
    good = good_header().pack()
    page = bytearray(good + bytes(2048))
    for at, text in edits:
        page[at : at + len(text)] = text
    page = page[:4096]
    assert (layout.parse(bytes(page)) is not None) == (bytes(page[:2048]) == good)


@settings(deadline=None)
@given(field=st.integers(0, 11), value=words)
def test_a_header_with_a_right_checksum_and_wrong_numbers_is_believed_only_if_it_makes_sense(
    field: int, value: int
) -> None:
    page = bytearray(good_header().pack() + bytes(2048))
    fields = list(layout._FIXED.unpack_from(page))
    fields[3 + field] = value if field not in (6, 7) else value & 0xFFFFFFFF
    if field in (10, 11):
        fields[13 if field == 10 else 14] = value.to_bytes(32, "little") if field == 10 else value & 0xFFFFFFFF
        fields[3 + field] = layout._FIXED.unpack_from(page)[3 + field]
    layout._FIXED.pack_into(page, 0, *fields)
    struct.pack_into("<I", page, 12, 0)
    struct.pack_into("<I", page, 12, crc32(page[:2048]))
    header = layout.parse(bytes(page))
    if header is not None:
        assert 0 < header.capacity <= header.nbytes
        assert header.capacity % header.granule == 0
        assert header.journal_offset + 512 * header.journal_records <= header.data_offset
        assert header.chunk_bytes % header.granule == header.chunk_bytes % 4096 == 0
        assert header.total < 1 << 62


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=edits, tail=st.binary(max_size=64), size=st.sampled_from([0, 1, 4095, 4096, 5000, MIB]))
def test_a_left_over_file_with_any_content_is_taken_over(
    shm: Path, edits: list[tuple[int, bytes]], tail: bytes, size: int
) -> None:
    page = bytearray(good_header().pack() + bytes(2048))
    struct.pack_into("<Q", page, 8 * layout.W_READY, 99)
    for at, text in edits:
        page[at : at + len(text)] = text
    path = shm / "ecoffload.a"
    path.touch(0o600)
    path.write_bytes((bytes(page) + tail)[:size])
    with open_region(shm, capacity=65536, warm=True, namespace="n") as region:
        region.view([(0, 65536)])[0][:] = bytes(65536)
        assert region.start == ("cold" if size else "created")
        assert len(list_regions(shm)) == 1
    shutil.rmtree(shm)
    shm.mkdir()


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=edits)
def test_a_listing_and_a_reclaim_survive_any_file(shm: Path, edits: list[tuple[int, bytes]]) -> None:
    page = bytearray(good_header().pack() + bytes(2048))
    struct.pack_into("<Q", page, 8 * layout.W_READY, 99)
    for at, text in edits:
        page[at : at + len(text)] = text
    path = shm / (PREFIX + "x")
    path.touch(0o600)
    path.write_bytes(page[:4096])
    assert [each.state for each in list_regions(shm)] in (["ownerless"], ["unfinished"])
    assert [each.path for each in reclaim(shm)] == [str(path)]
    assert list(shm.iterdir()) == []


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed=st.dictionaries(st.integers(layout.W_READY, 272), words, min_size=1, max_size=6))
def test_a_warm_region_whose_changing_words_are_garbage_opens_and_schedules(shm: Path, changed: dict[int, int]) -> None:
    open_region(shm, capacity=65536, warm=True, namespace="n").close()
    path = shm / "ecoffload.a"
    with path.open("r+b") as file:
        for word, value in changed.items():
            file.seek(8 * word)
            file.write(struct.pack("<Q", value))
    with open_region(shm, capacity=65536, warm=True, namespace="n") as region:
        assert region.start in ("warm", "cold")
        region.begin_instance()
        slot = region.claim_slot(0)
        slot.finish_save(1)
        slot.finish_load(2)
        assert region.progress(1) == (1, 2)
    path.unlink()
