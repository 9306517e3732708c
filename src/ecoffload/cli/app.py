"""All commands of ``ecoffload``, each one thin: read options, call the library, show the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ecoffload import __version__
from ecoffload.cli.output import errors_end_here

__all__ = ["app"]

app = typer.Typer(
    name="ecoffload",
    epilog="Example: ecoffload demo --turns 2\n\n"
    "Exit codes: 0 ok, 1 a check failed, 2 bad input, 3 what was asked for is unavailable.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ecoffload {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Encoder outputs in host memory, reloaded instead of encoded again."""


AsJson = Annotated[bool, typer.Option("--json", metavar="", help="One JSON document on stdout instead of a table.")]
BackendName = Annotated[str, typer.Option("--backend", help="A backend's name; see 'ecoffload backends'.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Write a picture: .png, .svg or .pdf.")]

_POLICIES, _CAPACITIES = ["auto", "lru"], ["10%"]
TracePath = Annotated[
    Path, typer.Argument(metavar="TRACE", help="One lookup a row: CSV with a header or JSON lines, gzipped or not.")
]
KeyColumn = Annotated[str | None, typer.Option(help="The key's column, if it is not called key, obj, hash or so.")]
TokensColumn = Annotated[str | None, typer.Option(help="The column of tokens, if it is not called tokens.")]
BytesColumn = Annotated[str | None, typer.Option(help="The column of bytes, if it is not called bytes or size.")]
TokenBytes = Annotated[int, typer.Option(min=1, help="Bytes of one token: hidden size x bytes of its dtype.")]
Rows = Annotated[int, typer.Option(min=0, help="Only so many rows from the start; 0: all.")]


@app.command()
def demo(
    images: Annotated[
        Path | None, typer.Option(help="A folder of pictures; default: scikit-image's photographs.")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, max=1000, help="Turns of the conversation.")] = 6,
    capacity: Annotated[
        str | None,
        typer.Option(help="Host memory, such as 8MiB; default: three quarters of all pictures', two at least."),
    ] = None,
    backend: BackendName = "cpu",
    json: AsJson = False,
) -> None:
    """Encode photographs, drop and reload their encodings over a conversation, and verify every byte.

    Exit 1 for bytes that differ, 2 if a file could not be read as an image (it is named, the rest goes on).

    Example: ecoffload demo --turns 2 --capacity 4MiB
    """
    with errors_end_here():
        from ecoffload.cli.demo import run

        run(images, turns, capacity, backend, json)


@app.command()
def backends(
    probe: Annotated[bool, typer.Option("--probe", metavar="", help="Initialise each, in a child process.")] = False,
    json: AsJson = False,
) -> None:
    """List installed backends: encoding, kernels, and whether each can run here and why not.

    Example: ecoffload backends --json
    """
    with errors_end_here():
        from ecoffload.cli.backends import run

        run(probe, json)


@app.command()
def doctor(json: AsJson = False) -> None:
    """Look for what keeps an installation from working: versions, plugins, drivers, shared memory, limits.

    Exit 1 if a check failed; each finding comes with its remedy.

    Example: ecoffload doctor
    """
    with errors_end_here():
        from ecoffload.cli.doctor import run

        run(json)


@app.command()
def bench(
    backend: BackendName = "cpu",
    sizes: Annotated[
        list[str] | None, typer.Option(help="Block sizes, such as 7KiB,64KiB,1MiB; may be given again.")
    ] = None,
    total: Annotated[str, typer.Option(help="Bytes of one batch.")] = "32MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of which the best counts; a slow way gets fewer.")] = 3,
    entries: Annotated[int, typer.Option(min=1, help="Single entries whose latency is measured.")] = 100,
    plot: Plot = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="Measure nothing; compare two results of --json."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Measure the link's peak, our ways and naive ones by block size, latencies, registration and start-up.

    Example: ecoffload bench --sizes 7KiB,64KiB,1MiB --plot bench.png
    """
    with errors_end_here():
        from ecoffload.cli import bench as command

        if compare is not None:
            command.run_compare(*compare, json)
        else:
            command.run(backend, sizes or [], total, rounds, entries, plot, json)


@app.command()
def tune(
    backend: Annotated[str | None, typer.Option("--backend", help="Default: the only accelerator here.")] = None,
    json: AsJson = False,
) -> None:
    """Measure where a backend's ways of copying cross on this device, and keep that for later processes.

    Exit 3 if the backend has nothing to tune.

    Example: ecoffload tune --backend cuda
    """
    with errors_end_here():
        from ecoffload.cli.tune import run

        run(backend, json)


@app.command()
def regions(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Only these; default: all.")] = None,
    directory: Annotated[Path, typer.Option(help="Where regions lie.")] = Path("/dev/shm"),
    reclaim: Annotated[
        bool, typer.Option("--reclaim", metavar="", help="Unlink those that nobody maps, warm ones included.")
    ] = False,
    after: Annotated[float, typer.Option(min=0, help="With --reclaim: only those ownerless for so many seconds.")] = 0,
    watch: Annotated[bool, typer.Option("--watch", metavar="", help="Again and again, until interrupted.")] = False,
    interval: Annotated[float, typer.Option(min=0.05, help="With --watch: seconds between two looks.")] = 1,
    count: Annotated[int, typer.Option(min=0, help="With --watch: looks before it ends; 0: until interrupted.")] = 0,
    json: AsJson = False,
) -> None:
    """List the host regions of this machine: size, age, whose they are, who maps them. Read-only without --reclaim.

    Example: ecoffload regions --watch
    """
    with errors_end_here():
        from ecoffload.cli.regions import run

        run(ids or [], directory, reclaim, after, watch, interval, count, json)


@app.command()
def replay(
    trace: TracePath,
    policy: Annotated[
        list[str], typer.Option(help="auto, lru, fifo, s3-fifo or gdsf; may be given again.")
    ] = _POLICIES,
    capacity: Annotated[
        list[str], typer.Option(help="A size, or a percentage of the distinct objects' bytes; may be given again.")
    ] = _CAPACITIES,
    move: Annotated[bool, typer.Option("--move", metavar="", help="Also with real bytes, over a backend.")] = False,
    backend: BackendName = "cpu",
    key_column: KeyColumn = None,
    tokens_column: TokensColumn = None,
    bytes_column: BytesColumn = None,
    token_bytes: TokenBytes = 7168,
    rows: Rows = 0,
    plot: Plot = None,
    json: AsJson = False,
) -> None:
    """Play an access trace through the real index, allocator and policies, beside Belady's bound.

    Exit 1 if --move finds bytes that differ.

    Example: ecoffload replay trace.csv.gz --policy auto --policy lru --capacity 5% --capacity 8GiB
    """
    with errors_end_here():
        from ecoffload.cli import replay as command

        found = command.read(trace, key_column, tokens_column, bytes_column, token_bytes, rows)
        command.run(found, policy, capacity, backend, move, plot, json)


@app.command()
def size(
    trace: Annotated[
        Path | None, typer.Argument(metavar="TRACE", help="As for replay; or --live instead of a trace.")
    ] = None,
    live: Annotated[
        str | None, typer.Option(metavar="ID", help="A region's id: from its engine's ghost statistics.")
    ] = None,
    directory: Annotated[Path, typer.Option(help="With --live: where regions lie.")] = Path("/dev/shm"),
    share: Annotated[float, typer.Option(help="Of what an infinite cache would reach, above 0 and at most 1.")] = 0.9,
    key_column: KeyColumn = None,
    tokens_column: TokensColumn = None,
    bytes_column: BytesColumn = None,
    token_bytes: TokenBytes = 7168,
    rows: Rows = 0,
    plot: Plot = None,
    json: AsJson = False,
) -> None:
    """Say how large the cache should be: the miss-ratio curve of a trace or a running engine, and a recommendation.

    --live needs an engine that opened its cache with ghost_stats; else exit 3.

    Example: ecoffload size trace.csv.gz --share 0.95 --plot curve.png
    """
    with errors_end_here():
        from ecoffload.cli import size as command
        from ecoffload.cli.replay import read

        if (trace is None) == (live is None):
            raise typer.BadParameter("give a TRACE, or --live ID, and not both")
        if live is not None:
            command.run_live(live, directory, share, plot, json)
        elif trace is not None:
            found = read(trace, key_column, tokens_column, bytes_column, token_bytes, rows)
            command.run(found, share, plot, json)


@app.command(name="new-backend")
def new_backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The backend's name, for example acme-npu.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist or is empty.")],
    json: AsJson = False,
) -> None:
    """Write a package for a new backend, which installs and passes the conformance suite as it is.

    Example: ecoffload new-backend acme-npu ./ecoffload-acme-npu
    """
    with errors_end_here():
        from ecoffload.cli.new_backend import run

        run(name, directory, json)
