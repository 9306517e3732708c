"""Finding the one right library, calling it, and wording what it answers."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import timeit
from pathlib import Path

import numpy as np
import pytest
from emulated_drivers import Emulated, build, load
from hypothesis import given
from hypothesis import strategies as st

from ecoffload.drivers import (
    CUDA,
    DEVICE_LOST_CODES,
    FLAG_OVERLAP,
    HIP,
    ORDER_ANY,
    SIZE_MAX,
    BatchCall,
    Driver,
    MemcpyAttributes,
    loaded_libraries,
    open_library,
    words_at,
)
from ecoffload.errors import BackendUnavailable, DeviceLost, RegistrationRefused, SwapFailed

MAPS = """\
7f0000000000-7f0000001000 r--p 00000000 08:01 {inode}                     {path}
7f0000001000-7f0000002000 r-xp 00001000 08:01 {inode}                     {path}
"""


def maps_of(folder: Path, *paths: str) -> str:
    text = (
        "7fff00000000-7fff00001000 rw-p 00000000 00:00 0                          [stack]\n7e00-7f00 rw-p 0 00:00 0\n"
    )
    for i, path in enumerate(paths):
        text += MAPS.format(inode=100 + i, path=path)
    file = folder / "maps"
    file.write_text(text)
    return str(file)


# --- which library ---


def test_every_segment_of_one_library_is_one_copy(tmp_path: Path) -> None:
    assert loaded_libraries("libcuda", maps_of(tmp_path, "/usr/lib/libcuda.so.580.1")) == ["/usr/lib/libcuda.so.580.1"]


def test_two_files_are_two_copies(tmp_path: Path) -> None:
    maps = maps_of(tmp_path, "/opt/rocm/lib/libamdhip64.so.7.2.2", "/venv/torch/lib/libamdhip64.so")
    assert len(loaded_libraries("libamdhip64", maps)) == 2


@pytest.mark.parametrize(
    "name", ["libcuda.so.1", "libcuda.so", "libcuda-0a1b2c3d.so.1", "libcuda.so.580.95.05", "libcuda.so.1 (deleted)"]
)
def test_every_spelling_of_the_name_is_found(tmp_path: Path, name: str) -> None:
    maps = maps_of(tmp_path, f"/opt/a folder/{name}")
    assert loaded_libraries("libcuda", maps) == [f"/opt/a folder/{name.removesuffix(' (deleted)')}"]


@pytest.mark.parametrize(
    "name", ["libcudart.so.13", "libcuda_checkpoint.so", "libcuda.so.1.txt", "libcuda-preview.so.8"]
)
def test_another_librarys_name_is_not_mistaken_for_it(tmp_path: Path, name: str) -> None:
    assert loaded_libraries("libcuda", maps_of(tmp_path, f"/usr/lib/{name}")) == []


def test_the_loader_of_wsl_and_the_driver_behind_it_are_one(tmp_path: Path) -> None:
    maps = maps_of(tmp_path, "/usr/lib/wsl/lib/libcuda.so.1", "/usr/lib/wsl/drivers/nv_1/libcuda.so.1.1")
    assert loaded_libraries("libcuda", maps) == ["/usr/lib/wsl/lib/libcuda.so.1"]


def run_python(script: str, **environment: str) -> str:
    """A process of its own: which libraries this one maps is the other tests' doing."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_the_copy_that_the_process_holds_is_the_one_that_is_opened(tmp_path: Path) -> None:
    library = tmp_path / "bundled" / "libamdhip64.so"
    library.parent.mkdir()
    library.write_bytes(build("hip").read_bytes())
    out = run_python(f"""
        import ctypes
        torchs = ctypes.CDLL({str(library)!r})
        torchs.emu_set(b"version", ctypes.c_uint64(70200002))
        from ecoffload.drivers import HIP, Driver, loaded_libraries
        driver = Driver.open(HIP)
        version = ctypes.c_int()
        driver.function("hipRuntimeGetVersion", ctypes.c_void_p)(ctypes.addressof(version))
        print(driver.path, version.value, len(loaded_libraries("libamdhip64")))
    """)
    assert out == f"{library} 70200002 1"


def test_two_copies_are_refused_by_name(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "libamdhip64.so").write_bytes(build("hip").read_bytes())
    out = run_python(f"""
        import ctypes
        ctypes.CDLL("{tmp_path}/a/libamdhip64.so"), ctypes.CDLL("{tmp_path}/b/libamdhip64.so")
        from ecoffload.drivers import HIP, Driver
        from ecoffload.errors import BackendUnavailable
        try:
            Driver.open(HIP)
        except BackendUnavailable as exc:
            print(exc.reason)
    """)
    assert "holds 2 copies of libamdhip64" in out
    assert f"{tmp_path}/a/libamdhip64.so" in out
    assert f"{tmp_path}/b/libamdhip64.so" in out


def test_a_library_that_is_nowhere_says_what_to_do() -> None:
    with pytest.raises(BackendUnavailable, match=r"libnowhere\.so\.9 cannot be loaded .*; install it") as caught:
        open_library("libnowhere", ("libnowhere.so.9",), name="nowhere", remedy="install it")
    assert caught.value.details["name"] == "nowhere"


def test_a_library_of_another_format_says_so(tmp_path: Path) -> None:
    (tmp_path / "libamdhip64.so").write_text("not a library")
    with pytest.raises(BackendUnavailable, match=r"cannot be opened: .*(ELF|short)"):
        Driver.open(HIP, str(tmp_path / "libamdhip64.so"))


@pytest.mark.parametrize(("family", "kind"), [(CUDA, "cuda"), (HIP, "hip")])
def test_the_environment_names_another_library_for_tests(
    family: object, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated = load(kind)  # type: ignore[arg-type]
    monkeypatch.setenv(family.variable, emulated.path)  # type: ignore[attr-defined]
    assert Driver.open(family).path == emulated.path  # type: ignore[arg-type]


# --- calls and errors ---


@pytest.fixture(scope="module")
def cuda() -> Emulated:
    return load("cuda")


@pytest.fixture(scope="module")
def hip() -> Emulated:
    return load("hip")


def test_an_error_carries_the_drivers_name_and_text_and_our_details(cuda: Emulated, hip: Emulated) -> None:
    with pytest.raises(SwapFailed, match=r"copying: CUDA_ERROR_INVALID_VALUE \(1\): invalid argument") as caught:
        cuda.driver.check(1, "copying", index=7)
    assert caught.value.details == {"code": 1, "index": 7}
    with pytest.raises(RegistrationRefused, match=r"pinning: hipErrorNotSupported \(801\): operation not supported"):
        hip.driver.check(801, "pinning", RegistrationRefused)


def test_a_code_that_the_driver_does_not_know_is_still_worded(cuda: Emulated) -> None:
    assert cuda.driver.error_text(12345) == "error (12345)"


@pytest.mark.parametrize("code", sorted(DEVICE_LOST_CODES))
def test_a_code_that_ends_the_context_is_a_lost_device(cuda: Emulated, code: int) -> None:
    error = cuda.driver.error(code, "waiting")
    assert isinstance(error, DeviceLost)
    assert "this process must start again" in str(error)


@pytest.mark.parametrize("code", [1, 2, 201, 600, 712, 801, 900])
def test_a_code_that_a_context_survives_is_not_a_lost_device(cuda: Emulated, code: int) -> None:
    assert not isinstance(cuda.driver.error(code, "waiting"), DeviceLost)


def test_a_runtimes_last_error_is_cleared_so_that_torch_does_not_raise_it(hip: Emulated) -> None:
    code = hip.driver.function("hipSetDevice", ctypes.c_int)(99)
    hip.driver.error(code, "choosing device 99")
    assert hip.driver.function("hipPeekAtLastError")() == 0


def test_a_missing_function_is_named(cuda: Emulated) -> None:
    assert cuda.driver.find("cuNoSuchThing") is None
    with pytest.raises(BackendUnavailable, match="has no function cuNoSuchThing"):
        cuda.driver.function("cuNoSuchThing")


def test_two_users_of_one_library_do_not_share_argument_types(cuda: Emulated) -> None:
    mine = cuda.driver.function("cuInit", ctypes.c_uint)
    other = Driver.open(CUDA, cuda.path).function("cuInit")
    assert mine.argtypes == (ctypes.c_uint,)  # type: ignore[attr-defined]
    assert other.argtypes == ()  # type: ignore[attr-defined]


def test_a_fork_is_noticed(cuda: Emulated) -> None:
    assert not cuda.driver.forked
    code = f"""
        import os
        from ecoffload.drivers import CUDA, Driver
        driver = Driver.open(CUDA, {cuda.path!r})
        child = os.fork()
        if child == 0:
            os._exit(driver.forked)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), driver.forked)
    """
    assert run_python(code) == "1 False"


def test_relaxed_capture_gives_the_threads_mode_back(cuda: Emulated) -> None:
    exchange = cuda.driver.function("cuThreadExchangeStreamCaptureMode", ctypes.POINTER(ctypes.c_int))

    def mode_now() -> int:
        mode = ctypes.c_int(1)
        exchange(ctypes.byref(mode))
        now = mode.value
        exchange(ctypes.byref(ctypes.c_int(now)))
        return now

    cuda.driver.function("cuInit", ctypes.c_uint)(0)
    before = mode_now()
    with cuda.driver.relaxed_capture():
        assert mode_now() == 2
    assert mode_now() == before


# --- the batched copy ---

Seen = list[tuple[int, ...]]
Prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 9)


def recorder(seen: Seen, code: int = 0, fail: int | None = None) -> tuple[object, int]:
    """A function with the driver's prototype that notes its arguments; keep the first result alive."""

    def call(*words: int) -> int:
        seen.append(words)
        if fail is not None:
            ctypes.c_size_t.from_address(words[7]).value = fail
        return code

    function = Prototype(call)
    return function, ctypes.cast(function, ctypes.c_void_p).value or 0


def test_the_attributes_have_the_drivers_layout() -> None:
    offsets = {name: getattr(MemcpyAttributes, name).offset for name, _ in MemcpyAttributes._fields_}
    assert offsets == {"srcAccessOrder": 0, "srcLocHint": 4, "dstLocHint": 12, "flags": 20}
    assert (ctypes.sizeof(MemcpyAttributes), ctypes.alignment(MemcpyAttributes)) == (24, 4)


def test_every_argument_arrives_in_its_place() -> None:
    seen: Seen = []
    keep, address = recorder(seen)
    call = BatchCall(address, order=ORDER_ANY, flags=FLAG_OVERLAP)
    assert call(0x1000, 0x2000, 0x3000, 5, 0x7777) == (0, None)
    dst, src, size, count, attributes, firsts, number, fail, stream = seen[0]
    assert (dst, src, size, count, number, stream) == (0x1000, 0x2000, 0x3000, 5, 1, 0x7777)
    assert bytes(ctypes.string_at(attributes, 24)) == b"\3" + bytes(19) + b"\1" + bytes(3)
    assert ctypes.c_size_t.from_address(firsts).value == 0
    assert ctypes.c_size_t.from_address(fail).value == SIZE_MAX
    assert keep is not None


def test_without_attributes_none_are_passed_but_the_index_is() -> None:
    seen: Seen = []
    keep, address = recorder(seen)
    BatchCall(address, attributes=False)(1, 2, 3, 4, 5)
    assert seen[0][4:7] == (0, 0, 0)
    assert seen[0][7] != 0
    assert keep is not None


@pytest.mark.parametrize(("said", "read"), [(0, 0), (2, 2), (SIZE_MAX, None), (None, None), (3, None)])
def test_the_index_is_of_this_call_or_none(said: int | None, read: int | None) -> None:
    keep, address = recorder([], code=1, fail=said)
    assert BatchCall(address)(1, 2, 3, 3, 9) == (1, read)
    assert keep is not None


def test_an_index_left_from_an_earlier_failure_is_not_read_again() -> None:
    answers = iter([4, None])

    def fails(*words: int) -> int:
        said = next(answers)
        if said is not None:
            ctypes.c_size_t.from_address(words[7]).value = said
        return 1

    function = Prototype(fails)
    call = BatchCall(ctypes.cast(function, ctypes.c_void_p).value or 0)
    assert call(1, 2, 3, 10, 9) == (1, 4)
    assert call(1, 2, 3, 10, 9) == (1, None)


def test_each_thread_has_an_index_of_its_own() -> None:
    seen: Seen = []
    keep, address = recorder(seen)
    call = BatchCall(address)
    call(1, 2, 3, 4, 5)
    thread = threading.Thread(target=call, args=(1, 2, 3, 4, 5))
    thread.start()
    thread.join()
    assert seen[0][7] != seen[1][7]
    assert seen[0][4:6] == seen[1][4:6]
    assert keep is not None


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_words_are_read_as_unsigned(words: list[int]) -> None:
    array = np.array(words, dtype=np.uint64)
    assert words_at(array.ctypes.data, len(words)) == words


def test_the_call_costs_a_few_microseconds_at_most(tmp_path: Path) -> None:
    source = tmp_path / "batch.c"
    source.write_text("int f(long a,long b,long c,long n,long d,long e,long g,long h,long s) { return 0; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "batch.so"), str(source)], check=True)
    entry = ctypes.cast(ctypes.CDLL(str(tmp_path / "batch.so")).f, ctypes.c_void_p).value
    call = BatchCall(entry or 0)
    at = 0x7FD6E0000000
    # An idle core needs 1.6 us; the bar leaves room for a busy machine and still finds a rebuilt structure a call.
    assert min(timeit.repeat(lambda: call(at, at, at, 1000, 77), number=2000, repeat=9)) / 2000 < 8e-6
