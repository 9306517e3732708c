"""The killing test: SIGKILL at random moments to random subsets of an engine's processes, and a look at what is left.

    python tests/soak/killing.py [--kills N] [--minutes M] [--seed S] [--directory /dev/shm]

A scheduler, two workers and the copier that makes the first worker's copies (a separate process, which goes on writing
after its worker was killed) share a warm region of 4 MiB. They are killed and started again until N rounds of kills and
M minutes have passed. Every word of every entry that is served is compared with what its key and generation say. The
last line on stdout is `kills=N served=N torn=0 lost=0 leaked=0`, and the exit status is 1 unless the zeros are zeros:

* kills: rounds; in each at least one process gets SIGKILL
* served: entries that a worker loaded and looked through
* torn: entries served that are not one whole entry of their key, or of a generation that must not be there any more
* lost: entries that an earlier process had committed and that vanished without an eviction or an invalidation
* leaked: descriptors, mappings, files in the directory, pins, and granules still kept aside when all is quiet

What goes wrong is told on stderr, with the seed.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import processes
from processes import Line

from ecoffload.regions import list_regions, reclaim

QUIET_EVERY = 8  # rounds
ROLES = ("scheduler", "worker 0", "copier", "worker 1")


class Process:
    """A child and the line to it."""

    def __init__(self, role: str, pid: int, line: Line) -> None:
        self.role = role
        self.pid = pid
        self.line = line


class Truth:
    """What must be so, by what schedulers said before they were killed. Generations count up over all of them."""

    def __init__(self, complain: Callable[[str], None]) -> None:
        self.complain = complain
        self.torn = self.lost = self.served = 0
        self._generation: dict[bytes, int] = {}  # the only one of its key that may be there
        self._committed: set[bytes] = set()  # keys that the next scheduler has to find
        self._expected: dict[tuple[int, int], tuple[bytes, int | None]] = {}  # by instance and number of a load
        self._invalidating: set[bytes] = set()

    def cold(self, why: str) -> None:
        """A start that found nothing."""
        self._lose(self._committed, f"a cold start ({why})")
        self._committed, self._generation = set(), {}

    def adopted(self, found: list[bytes]) -> None:
        """A scheduler has read the journal."""
        keys = set(found)
        self._lose({key for key in self._committed - keys if key.startswith(b"k")}, "not in the journal")
        for key in keys:
            if key not in self._generation or key.startswith(b"c"):
                self.torn += 1
                self.complain(f"{key!r} came back, which was invalidated or not to outlive its process")
        self._generation = {key: self._generation[key] for key in keys if key in self._generation}
        self._committed = keys

    def dropped(self, count: int) -> None:
        if count:
            self.lost += count
            self.complain(f"{count} records or entries could not be believed at the restart")

    def planned(self, generations: dict[bytes, int]) -> None:
        """Saves have been planned; no plan has left yet. Whatever was there of these keys is gone."""
        for key, generation in generations.items():
            self._generation[key] = generation
            self._committed.discard(key)

    def ready(self, key: bytes) -> None:
        self._committed.add(key)

    def going(self, key: bytes, why: str) -> None:
        """The journal is about to be told that an entry is gone; a kill may leave it there."""
        self._committed.discard(key)
        if why == "removed" and key not in self._invalidating:
            self._lose({key}, "nobody had asked for its removal")

    def invalidate(self, key: bytes) -> None:
        self._invalidating.add(key)

    def invalidated(self, key: bytes) -> None:
        self._invalidating.discard(key)
        self._committed.discard(key)
        self._generation.pop(key, None)

    def loading(self, instance: int, number: int, key: bytes) -> None:
        if len(self._expected) > 100_000:
            self._expected = dict(list(self._expected.items())[50_000:])
        self._expected[instance, number] = key, self._generation.get(key)

    def found(self, instance: int, number: int, key: bytes, generation: int | None) -> None:
        """A worker has looked through what it loaded."""
        self.served += 1
        expected = self._expected.get((instance, number))
        if expected != (key, generation):
            self.torn += 1
            self.complain(f"load {number} gave {key!r} of generation {generation}, expected {expected}")

    def _lose(self, keys: set[bytes], why: str) -> None:
        if keys:
            self.lost += len(keys)
            self.complain(f"lost {sorted(keys)}: {why}")


class Killing:
    """One run. `alive` holds the engine's processes by role, `late` the copiers whose worker is gone."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.seed = seed
        self.chance = random.Random(seed)
        self.alive: dict[str, Process] = {}
        self.late: list[Process] = []
        self.kills = self.leaked = self.failed = 0
        self.starts: Counter[str] = Counter()
        self.schedulers = 0
        self.truth = Truth(self.complain)
        self.is_quiet = False

    def complain(self, what: str) -> None:
        print(f"seed {self.seed}, round {self.kills}: {what}", file=sys.stderr, flush=True)

    # --- processes --------------------------------------------------------------------------------------------------

    def fork(self, role: str, main: Callable[..., None], *args: Any, drop: socket.socket | None = None) -> Process:
        """A child that runs `main(line, directory, *args)` and has nothing else of this process's; `drop` neither."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            for each in [*self.alive.values(), *self.late]:
                each.line.socket.close()
            ours.close()
            if drop is not None:
                drop.close()
            processes.run(main, Line(theirs), self.directory, *args)
        theirs.close()
        return Process(role, pid, Line(ours))

    def start(self) -> None:
        """Start whatever is not there."""
        alive = self.alive
        if "scheduler" not in alive:
            self.schedulers += 1
            seed, first = self.chance.getrandbits(32), 1_000_000 * self.schedulers
            alive["scheduler"] = self.fork("scheduler", processes.scheduler, seed, first)
        if "worker 0" not in alive:
            client, device = socket.socketpair()
            seed = self.chance.getrandbits(32)
            alive["copier"] = self.fork("copier", processes.copier, seed, device, drop=client)
            alive["worker 0"] = self.fork("worker 0", processes.worker, 0, client, drop=device)
            client.close()
            device.close()
        if "worker 1" not in alive:
            alive["worker 1"] = self.fork("worker 1", processes.worker, 1, None)

    def kill(self, roles: list[str]) -> None:
        victims = [self.alive[role] for role in roles if role in self.alive]
        for each in victims:
            os.kill(each.pid, signal.SIGKILL)
        self.kills += bool(victims)
        for each in victims:
            self.ended(each, os.waitpid(each.pid, 0)[1])

    def reap(self) -> None:
        """Take note of who has ended."""
        for each in [*self.alive.values(), *self.late]:
            pid, status = os.waitpid(each.pid, os.WNOHANG)
            if pid:
                self.ended(each, status)

    def ended(self, process: Process, status: int) -> None:
        self.listen(process)  # to what it said before
        process.line.socket.close()
        if process in self.late:
            self.late.remove(process)
        if self.alive.get(process.role) is process:
            del self.alive[process.role]
        if process.role == "worker 0" and "copier" in self.alive:
            self.late.append(self.alive.pop("copier"))
        code = os.waitstatus_to_exitcode(status)
        if code not in (-signal.SIGKILL, 0, processes.DEVICE_LOST):
            self.failed += 1
            self.complain(f"{process.role} ended with status {code}")

    # --- what they say ----------------------------------------------------------------------------------------------

    def listen(self, process: Process) -> None:
        try:
            while (message := process.line.receive()) is not None:
                self.hear(process, *message)
        except EOFError:
            return

    def hear(self, process: Process, what: str, *said: Any) -> None:
        truth = self.truth
        if what == "start":
            start, reason = said
            self.starts[start] += 1
            if start in ("created", "cold"):
                truth.cold(reason)
        elif what == "plan":
            for role in ("worker 0", "worker 1"):
                if role in self.alive:
                    self.alive[role].line.offer("plan", *said)  # one that does not read loses it, as in an engine
        elif what == "served":
            instance, found = said
            for each in found:
                truth.found(instance, *each)
        elif what == "quiet":
            pins, aside = said
            self.is_quiet = True
            self.leak(pins, "pins are held although all is quiet")
            if not self.late:
                self.leak(aside, "bytes are kept aside although nobody is left who could write there")
        elif what == "stuck":
            self.is_quiet = True
            self.leak(said[0], f"saves and loads are in flight for ever: {said[1]}")
        elif what == "closed":
            self.leak(said[0], f"descriptors were kept by {process.role}")
            self.leak(said[1], f"mappings were kept by {process.role}")
        else:
            getattr(truth, what)(*said)

    def leak(self, count: int, what: str) -> None:
        if count:
            self.leaked += count
            self.complain(f"{count} {what}")

    def attend(self, seconds: float) -> None:
        """Carry messages and start what ends, for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            by_socket = {each.line.socket: each for each in [*self.alive.values(), *self.late]}
            for readable in select.select(list(by_socket), [], [], min(left, 0.02))[0]:
                self.listen(by_socket[readable])
            self.reap()
            self.start()

    # --- a run ------------------------------------------------------------------------------------------------------

    def victims(self) -> list[str]:
        """Who is killed next: often the whole engine, with or without the device's copier."""
        kind = self.chance.random()
        if kind < 0.25:
            return list(ROLES)
        if kind < 0.5:
            return [role for role in ROLES if role != "copier"]
        return self.chance.sample(ROLES, self.chance.randrange(1, len(ROLES)))

    def stop_for_a_while(self) -> None:
        """A process that does not run is slow, and not dead."""
        process = self.chance.choice([*self.alive.values()])
        os.kill(process.pid, signal.SIGSTOP)
        self.attend(0.15 * self.chance.random())
        if process in [*self.alive.values(), *self.late]:
            os.kill(process.pid, signal.SIGCONT)

    def quieten(self) -> None:
        """Let everything in flight end; nothing may be held then."""
        self.is_quiet = False
        end = time.monotonic() + 60
        told = None
        while not self.is_quiet:
            self.attend(0.02)
            scheduler = self.alive["scheduler"]
            if scheduler is not told and not self.late:
                scheduler.line.offer("quiet")
                told = scheduler
            if time.monotonic() > end:
                self.failed += 1
                self.complain("it never became quiet")
                return

    def run(self, kills: int, minutes: float) -> None:
        end = time.monotonic() + 60 * minutes
        told = time.monotonic()
        while self.kills < kills or time.monotonic() < end:
            if time.monotonic() > told + 60:
                told = time.monotonic()
                print(f"so far: {self.verdict()}", file=sys.stderr, flush=True)
            self.start()
            self.attend(self.chance.random() * self.chance.choice((0.05, 0.4, 0.8)))
            if self.chance.random() < 0.2:
                self.stop_for_a_while()
            if self.kills % QUIET_EVERY == QUIET_EVERY - 1:
                self.quieten()
            self.kill(self.victims())
        self.start()
        self.quieten()
        self.finish()

    def finish(self) -> None:
        """End everybody in good order, and count what is left."""
        for role in ("worker 0", "worker 1", "scheduler"):
            self.alive[role].line.offer("quit")
        end = time.monotonic() + 60
        while (left := [*self.alive.values(), *self.late]) and time.monotonic() < end:
            for each in left:
                self.listen(each)
            self.reap()
            time.sleep(0.005)
        for each in left:
            self.failed += 1
            self.complain(f"{each.role} did not end")
            os.kill(each.pid, signal.SIGKILL)
            os.waitpid(each.pid, 0)
        states = [each.state for each in list_regions(self.directory)]
        if states != ["ownerless"]:
            self.failed += 1
            self.complain(f"the regions left are {states}")
        reclaim(self.directory)
        self.leak(len(list(self.directory.iterdir())), "files are left")

    def verdict(self) -> str:
        truth = self.truth
        return f"kills={self.kills} served={truth.served} torn={truth.torn} lost={truth.lost} leaked={self.leaked}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="rounds, at least (20)")
    parser.add_argument("--minutes", type=float, default=0.0, help="minutes, at least (0)")
    parser.add_argument("--seed", type=int, default=None, help="of victims and moments (drawn if not given)")
    parser.add_argument("--directory", default="/dev/shm", help="a tmpfs (/dev/shm)")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left behind
    seed = random.randrange(1 << 32) if asked.seed is None else asked.seed
    directory = Path(tempfile.mkdtemp(prefix="ecoffload-killing-", dir=asked.directory))
    held = processes.descriptors()
    began = time.monotonic()
    killing = Killing(directory, seed)
    try:
        killing.run(asked.kills, asked.minutes)
        killing.leak(processes.descriptors() - held, "descriptors were kept by the test itself")
    finally:
        for each in [*killing.alive.values(), *killing.late]:
            with suppress(ProcessLookupError, ChildProcessError):  # whatever ended the run may have come in between
                os.kill(each.pid, signal.SIGKILL)
                os.waitpid(each.pid, 0)
        shutil.rmtree(directory)
    took = time.monotonic() - began
    print(f"seed {seed}: {took:.0f} s, {60 * killing.kills / took:.0f} kills a minute, schedulers by their start:")
    print(", ".join(f"{count} {start}" for start, count in sorted(killing.starts.items())))
    print(killing.verdict())
    truth = killing.truth
    return 1 if truth.torn or truth.lost or killing.leaked or killing.failed else 0


if __name__ == "__main__":
    sys.exit(main())
