"""Memory: what does not fit is one clear error, before or while it is populated; nothing is left and nothing faults.

Named after shared lists of field reports where a test answers one: C5 and C7 (pinned memory), D1, D2, D6 (tmpfs).
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ecoffload import hostmem
from ecoffload.errors import NoSpace, RegionError
from ecoffload.hostmem import Headroom
from ecoffload.region import HostRegion

MIB = 1 << 20

# Run inside a tmpfs of its own: reports the error's details and what lies there afterwards.
TRY = """
    from ecoffload import hostmem
    from ecoffload.errors import NoSpace
    {before}
    try:
        region = HostRegion.open("a", capacity=int(args[1]), granule=4096, directory=args[0])
    except NoSpace as error:
        stat = os.statvfs(args[0])
        say("nospace", error.asked, error.free, error.headroom is not None, error.path == args[0] + "/ecoffload.a")
        say(os.listdir(args[0]), stat.f_bavail == stat.f_blocks)
        say(error)
"""


def open_region(shm: Path, **options: Any) -> HostRegion:
    return HostRegion.open("a", **{"capacity": MIB, "granule": 4096, "directory": shm} | options)


def test_d1_a_region_larger_than_its_tmpfs_is_one_clear_error_and_leaves_nothing(in_tmpfs: Callable[..., Any]) -> None:
    process = in_tmpfs("8m", TRY.format(before=""), 64 * MIB)
    status, out, err = process.end()
    first, second, text = out.splitlines()
    assert (status, err) == (0, "")
    word, asked, free, *rest = first.split()
    assert (word, int(free), rest) == ("nospace", 8 * MIB, ["True", "True"])
    assert 64 * MIB < int(asked) < 65 * MIB
    assert second == "[] True"
    for part in ("capacity 67108864", asked, "8388608 are free", "--shm-size=65m", "sizeLimit: 65Mi", "medium: Memory"):
        assert part in text


def test_d1_a_shortfall_that_shows_only_while_populating_is_the_same_error(in_tmpfs: Callable[..., Any]) -> None:
    # As when another process takes the space between the look and the population.
    before = "from ecoffload.opening import Opener; Opener._check_room = lambda self, fd: None"
    status, out, err = in_tmpfs("8m", TRY.format(before=before), 64 * MIB).end()
    first, second, text = out.splitlines()
    assert (status, err) == (0, "")
    assert first.startswith("nospace")
    assert int(first.split()[2]) == 8 * MIB
    assert second == "[] True"
    assert "Bad address" in text
    assert "--shm-size" in text


def test_d1_a_failed_population_leaves_no_mapping_and_no_descriptor(in_tmpfs: Callable[..., Any]) -> None:
    before = "from ecoffload.opening import Opener; Opener._check_room = lambda self, fd: None"
    code = TRY.format(before=before) + '    say("ecoffload.a" in open("/proc/self/maps").read())\n'
    code = "    before = os.listdir('/proc/self/fd')\n" + code + "    say(os.listdir('/proc/self/fd') == before)\n"
    status, out, _ = in_tmpfs("8m", code, 64 * MIB).end()
    assert status == 0
    assert out.splitlines()[-2:] == ["False", "True"]


def test_d2_every_page_can_be_written_when_the_tmpfs_has_filled_up_since(in_tmpfs: Callable[..., Any]) -> None:
    code = """
        region = HostRegion.open("a", capacity=4 << 20, granule=4096, directory=args[0])
        try:
            with open(args[0] + "/filler", "wb") as filler:
                filler.write(b"x" * (16 << 20))
        except OSError as error:
            say(error.strerror)
        region.view([(0, region.nbytes)])[0][:] = b"y" * region.nbytes
        say("alive")
    """
    status, out, err = in_tmpfs("8m", code).end()
    assert (status, out, err) == (0, "No space left on device\nalive\n", "")


def test_d2_on_an_old_kernel_every_page_is_reserved_as_well(in_tmpfs: Callable[..., Any]) -> None:
    before = "import errno; hostmem._madvise_populate = lambda address, nbytes: errno.EINVAL"
    code = f"""
        from ecoffload import hostmem
        {before}
        region = HostRegion.open("a", capacity=6 << 20, granule=4096, directory=args[0])
        say(os.stat(region.path).st_blocks * 512 == os.stat(region.path).st_size)
        region.view([(0, region.nbytes)])[0][:] = b"y" * region.nbytes
        region.close()
    """
    assert in_tmpfs("8m", code).end() == (0, "True\n", "")


def test_d6_without_populate_a_shortfall_is_still_one_clear_error(in_tmpfs: Callable[..., Any], tmp_path: Path) -> None:
    before = "import errno; hostmem._madvise_populate = lambda address, nbytes: errno.EINVAL; "
    before += "from ecoffload.opening import Opener; Opener._check_room = lambda self, fd: None"
    status, out, err = in_tmpfs("8m", TRY.format(before=before), 64 * MIB).end()
    first, second, text = out.splitlines()
    assert (status, err) == (0, "")
    assert first.startswith("nospace")
    assert second == "[] True"
    assert "No space left on device" in text


@pytest.mark.parametrize("error", [0, errno.EINVAL])
def test_d6_populating_changes_no_byte(shm: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    if error:
        monkeypatch.setattr(hostmem, "_madvise_populate", lambda address, nbytes: error)
    path = shm / "file"
    path.write_bytes(os.urandom(3 * MIB))
    before = path.read_bytes()
    fd = os.open(path, os.O_RDWR)
    try:
        os.ftruncate(fd, 4 * MIB)
        address = hostmem.map_shared(fd, 4 * MIB)
        assert hostmem.populate(fd, address, 4 * MIB, page=4096) == ("fallocate" if error else "populate")
        hostmem.unmap(address, 4 * MIB)
        assert os.fstat(fd).st_blocks * 512 == 4 * MIB
    finally:
        os.close(fd)
    assert path.read_bytes() == before + bytes(MIB)


def test_d6_another_error_of_populate_is_told_as_it_is(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostmem, "_madvise_populate", lambda address, nbytes: errno.EIO)
    with pytest.raises(RegionError, match="could not be reserved: Input/output error") as caught:
        open_region(shm)
    assert not isinstance(caught.value, NoSpace)
    assert list(shm.iterdir()) == []


def test_d6_a_bad_address_on_a_roomy_tmpfs_names_the_errno(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostmem, "_madvise_populate", lambda address, nbytes: errno.EFAULT)
    with pytest.raises(NoSpace, match="Bad address"):
        open_region(shm)
    assert list(shm.iterdir()) == []


def test_an_error_in_one_slice_stops_the_others(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostmem, "_SLICE", 4096)
    calls = []

    def second_fails(address: int, nbytes: int) -> int:
        calls.append(address)
        return errno.ENOMEM if len(calls) == 2 else 0

    monkeypatch.setattr(hostmem, "_madvise_populate", second_fails)
    with pytest.raises(NoSpace, match="Cannot allocate memory"):
        open_region(shm)
    assert len(calls) < 40  # of more than 256 slices


def test_every_core_populates(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostmem, "_SLICE", 65536)
    monkeypatch.setattr(hostmem, "cpu_count", lambda: 3)
    meeting = threading.Barrier(3)
    threads: set[int] = set()
    real = hostmem._madvise_populate

    def populate(address: int, nbytes: int) -> int:
        if threading.current_thread() is not threading.main_thread() and threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            meeting.wait(10)
        return real(address, nbytes)

    monkeypatch.setattr(hostmem, "_madvise_populate", populate)
    with open_region(shm) as region:
        assert len(threads) == 3
        assert region.path.stat().st_blocks * 512 == region.path.stat().st_size


def test_c5_the_file_takes_what_was_asked_rounded_up_to_pages_and_the_header(shm: Path) -> None:
    capacity = 3 * MIB + 12345  # an allocator of powers of two would take 4 MiB
    with open_region(shm, capacity=capacity, granule=1) as region:
        status = region.path.stat()
        assert region.nbytes == -(-capacity // 4096) * 4096
        assert status.st_size == status.st_blocks * 512 == region.nbytes + 4096 + 64 * 1024


def test_c7_a_low_limit_of_locked_memory_does_not_hinder_a_region(shm: Path, child: Callable[..., Any]) -> None:
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        with HostRegion.open("a", capacity=8 << 20, granule=4096, directory=args[0]) as region: say(region.start)
    """
    assert child(code, shm).end() == (0, "created\n", "")


def test_a_file_size_limit_is_a_clear_error(shm: Path, child: Callable[..., Any]) -> None:
    code = """
        import resource, signal
        from ecoffload.errors import RegionError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try: HostRegion.open("a", capacity=8 << 20, granule=4096, directory=args[0])
        except RegionError as error: say(error)
        say(os.listdir(args[0]))
    """
    status, out, err = child(code, shm).end()
    assert (status, err) == (0, "")
    assert "File too large" in out.splitlines()[0]
    assert out.splitlines()[1] == "[]"


def test_an_address_space_too_small_is_a_clear_error(shm: Path, child: Callable[..., Any]) -> None:
    code = """
        import resource
        from ecoffload.errors import NoSpace
        with open("/proc/self/statm") as statm: limit = (16 << 20) + int(statm.read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try: HostRegion.open("a", capacity=40 << 20, granule=4096, directory=args[0])
        except NoSpace as error: say("Cannot allocate memory" in str(error))
        say(os.listdir(args[0]))
    """
    assert child(code, shm).end() == (0, "True\n[]\n", "")


def test_a_cgroup_with_too_little_left_refuses_before_a_page_is_taken(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostmem, "cgroup_headroom", lambda: Headroom(MIB // 2, "/sys/fs/cgroup/memory.max"))
    taken = []
    monkeypatch.setattr(hostmem, "populate", lambda *args, **options: taken.append(args))
    with pytest.raises(NoSpace) as caught:
        open_region(shm)
    assert caught.value.details["headroom"] == MIB // 2
    for part in ("524288 are left by /sys/fs/cgroup/memory.max", "raise the memory limit"):
        assert part in str(caught.value)
    assert "--shm-size" not in str(caught.value)  # the file system is large enough
    assert taken == []
    assert list(shm.iterdir()) == []


def test_a_machine_with_too_little_left_refuses_as_well(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostmem, "memory_available", lambda: Headroom(MIB // 2, "/proc/meminfo"))
    with pytest.raises(NoSpace, match="524288 are left by /proc/meminfo"):
        open_region(shm)


def test_a_joiner_does_not_ask_whether_there_is_room(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_region(shm):
        monkeypatch.setattr(hostmem, "cgroup_headroom", lambda: Headroom(0, "memory.max"))
        with open_region(shm) as joined:
            assert joined.start == "joined"


def test_ownerless_regions_in_the_way_are_named_with_the_command_that_frees_them(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HostRegion.open("old", capacity=MIB, granule=4096, directory=shm, warm=True, namespace="n").close()
    monkeypatch.setattr(hostmem, "memory_available", lambda: Headroom(MIB // 2, "/proc/meminfo"))
    with pytest.raises(NoSpace, match="of 1 ownerless regions with `ecoffload regions --reclaim`"):
        open_region(shm)


def test_huge_pages_hold_a_region_of_whole_huge_pages(child: Callable[..., Any], tmp_path: Path) -> None:
    pool = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    if os.geteuid() != 0 or not pool.exists() or int(pool.read_text()) < 4:
        pytest.skip("needs root and four free huge pages of 2 MiB")
    mount = f'mount -t hugetlbfs -o pagesize=2M none "{tmp_path}" && exec "$@"'
    code = """
        from ecoffload.errors import NoSpace
        with HostRegion.open("a", capacity=3 << 20, granule=7168, directory=args[0]) as region:
            region.view([(0, region.nbytes)])[0][:] = bytes(region.nbytes)
            say(region.nbytes, region.address % (2 << 20))
        try: HostRegion.open("a", capacity=1 << 50, granule=4096, directory=args[0])
        except NoSpace as error: say("vm.nr_hugepages" in str(error), os.listdir(args[0]))
    """
    process = child(code, tmp_path, prefix=("unshare", "-m", "sh", "-c", mount, "sh"))
    assert process.end() == (0, "4194304 0\nTrue []\n", "")


def test_a_tmpfs_with_huge_pages_holds_a_region(in_tmpfs: Callable[..., Any]) -> None:
    code = """
        with HostRegion.open("a", capacity=5 << 20, granule=7168, directory=args[0]) as region:
            region.view([(0, region.nbytes)])[0][:] = bytes(region.nbytes)
            say(os.stat(region.path).st_blocks * 512 >= os.stat(region.path).st_size)
    """
    status, out, err = in_tmpfs("8m,huge=always", code).end()
    if "wrong fs type" in err or "bad option" in err:
        pytest.skip("this kernel has no huge pages in a tmpfs")
    assert (status, out, err) == (0, "True\n", "")


def group(root: Path, path: str, **files: str) -> None:
    (root / path).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / path / name.replace("__", ".")).write_text(text)


def proc(root: Path, groups: str, *mounts: str) -> str:
    group(root, "proc", cgroup=groups, mountinfo="".join(each + "\n" for each in mounts))
    return str(root / "proc")


def test_cgroup_v2_the_tightest_group_up_the_tree_decides(tmp_path: Path) -> None:
    group(tmp_path, "cg/pod", memory__max="1000000\n", memory__current="900000\n", memory__stat="inactive_file 50000\n")
    group(tmp_path, "cg/pod/box", memory__max="5000000\n", memory__current="100000\n")
    group(tmp_path, "cg/pod/box/leaf", memory__max="max\n", memory__current="100000\n")
    where = proc(tmp_path, "0::/pod/box/leaf\n", f"30 23 0:26 / {tmp_path}/cg rw shared:4 - cgroup2 cgroup2 rw")
    assert hostmem.cgroup_headroom(where) == Headroom(150_000, f"{tmp_path}/cg/pod/memory.max")


def test_cgroup_v2_inside_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    group(tmp_path, "cg", memory__max="1000\n", memory__current="400\n")
    mount = f"30 23 0:26 /docker/abc {tmp_path}/cg rw - cgroup2 cgroup rw"
    assert hostmem.cgroup_headroom(proc(tmp_path, "0::/docker/abc\n", mount)) == Headroom(
        600, f"{tmp_path}/cg/memory.max"
    )
    # With a cgroup namespace the process sees itself at the root, or above it.
    for path in ("/", "/../other"):
        where = proc(tmp_path, f"0::{path}\n", f"30 23 0:26 / {tmp_path}/cg rw - cgroup2 cgroup rw")
        assert hostmem.cgroup_headroom(where) == Headroom(600, f"{tmp_path}/cg/memory.max")


def test_cgroup_v1_is_read_where_the_memory_controller_is_mounted(tmp_path: Path) -> None:
    group(tmp_path, "mem/a", memory__limit_in_bytes="5000\n", memory__usage_in_bytes="4500\n")
    group(tmp_path, "mem", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="4500\n")
    where = proc(
        tmp_path,
        "5:cpu:/a\n4:memory:/a\n0::/\n",
        f"31 23 0:27 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu",
        f"32 23 0:28 / {tmp_path}/mem rw - cgroup cgroup rw,memory",
    )
    assert hostmem.cgroup_headroom(where) == Headroom(500, f"{tmp_path}/mem/a/memory.limit_in_bytes")


@pytest.mark.parametrize("text", ["", "garbage", "max"])
def test_a_control_file_that_says_nothing_is_no_limit(tmp_path: Path, text: str) -> None:
    group(tmp_path, "cg", memory__max=text, memory__current=text)
    where = proc(tmp_path, "0::/\n", f"30 23 0:26 / {tmp_path}/cg rw - cgroup2 cgroup rw")
    assert hostmem.cgroup_headroom(where) is None


def test_without_proc_there_is_no_limit_to_read(tmp_path: Path) -> None:
    assert hostmem.cgroup_headroom(str(tmp_path / "none")) is None
    assert hostmem.memory_available(str(tmp_path / "none")) is None


def test_the_setting_of_huge_pages_is_the_word_in_brackets(tmp_path: Path) -> None:
    path = tmp_path / "shmem_enabled"
    assert hostmem.shmem_huge_pages(str(path)) == "never"
    path.write_text("always within_size [advise] never deny force\n")
    assert hostmem.shmem_huge_pages(str(path)) == "advise"


def test_huge_pages_are_asked_for_where_the_system_offers_them(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(hostmem, "shmem_huge_pages", lambda: "advise")
    monkeypatch.setattr(hostmem, "advise", lambda address, nbytes, *, huge: asked.append(huge))
    with open_region(shm):
        assert asked == [True]
