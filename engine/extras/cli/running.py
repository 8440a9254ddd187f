"""Run what decode and encode share, from the loaded VAE to the report: ranks of torchrun, checks, progress."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import log
from ...errors import InputError
from ..output.writing import check_target, write_text
from .options import kernels, memory_options
from .vaes import vae_file

if TYPE_CHECKING:
    from ...vae import VideoVAE
    from ..distributed.ranks import Ranks

#: Values of --split. They have no effect any more, and are accepted for one release so that scripts keep running.
SPLITS = ("auto", "segments", "rows")


def run_options(args: argparse.Namespace, ranks: Ranks | None) -> dict[str, Any]:
    """Return the options of `add_run_options` as arguments of a VideoVAE's decode and encode."""
    return {"devices": ranks or args.devices, "mixed_devices": args.mixed_devices, **memory_options(args)}


def check_alike(args: argparse.Namespace, ranks: Ranks | None, vae: VideoVAE, **files: Path) -> None:
    """Check before anything is written that all ranks have the same VAE, options that change bits, norm groups and
    input files (by the names that an error shows). Raises InputError on all ranks."""
    if ranks is not None:
        from ..distributed.consistency import of_bits, of_file

        ranks.check_same(VAE=of_file(vae.path), options=of_bits(vae), norm_groups=args.norm_groups,
                         **{name: of_file(path) for name, path in files.items()})  # fmt: skip


def with_ranks(
    args: argparse.Namespace, run: Callable[[argparse.Namespace, Ranks | None], int],
    help: Callable[[argparse.Namespace, Ranks], int],
) -> int:  # fmt: skip
    """Run a command, under torchrun on all ranks, and return its exit code.

    Args:
        args: of the command.
        run: called with `args` and the ranks (None without torchrun), under torchrun on rank 0 alone.
        help: called in its place on the other ranks.
    Raises:
        InputError: an option is unknown or cannot be used with torchrun.
    """
    from ..distributed.ranks import joined, under_torchrun

    args.vae = vae_file(args.vae)
    if args.split not in (None, *SPLITS):
        raise InputError(f"--split {args.split} is not one of {', '.join(SPLITS)}")
    if args.split is not None and os.environ.get("RANK", "0") == "0":
        log.warn(f"--split {args.split} has no effect: sharing rows of frames is gone, GPUs share the clip by segments")
    if not under_torchrun():
        return run(args, None)
    if args.devices:
        raise InputError(f"--devices {args.devices}: under torchrun each process has one device; leave it out")
    check_report(args)
    with joined() as ranks:
        return run(args, ranks) if ranks.rank == 0 else help(args, ranks)


def load_vae(args: argparse.Namespace, ranks: Ranks | None = None) -> VideoVAE:
    """Load the VAE of a command, with its options.

    Args:
        args: with the options of `add_vae_options`.
        ranks: of torchrun; each rank has a GPU of its machine, if there are any.
    """
    from ...kernels.cards import AUTO, PLAIN
    from ...loader import demo_vae_path, load, placement
    from ...options import DEFAULTS
    from ...request import Request

    options = replace(DEFAULTS.switched(args.on, args.off), min_db=args.min_db, kernels=kernels(args))
    device = args.device
    if device is None and getattr(args, "devices", None) not in (None, "auto", "all"):
        device = args.devices.partition(",")[0].strip()
    if device is None and ranks is not None:
        device = ranks.device
    if hasattr(args, "tiling"):
        Request(**memory_options(args))  # refuse wrong ones before anything is read or said
    where = placement(args.precision, device)
    if where.type == "cpu" and options.kernels not in (AUTO, PLAIN):
        raise InputError(f"--kernels {args.kernels}: a CPU runs torch's own operators; leave it out, or name a GPU "
                         "with --device")  # fmt: skip
    if args.vae is None and (ranks is None or ranks.rank == 0):
        log.warn("no --vae: the small demo VAE, which is only for trying things out")
    vae = load(args.vae or demo_vae_path(), precision=args.precision, device=device, norm_groups=args.norm_groups)
    vae.options = options
    return vae


def check_report(args: argparse.Namespace) -> None:
    """Check before any work that the file of --json can be written.

    Raises:
        InputError: the file cannot be written.
    """
    if isinstance(args.report, Path):
        if args.report.suffix.lower() != ".json":
            raise InputError(f"--json {args.report}: a report file ends in .json, or is - for standard output")
        check_target(args.report, args.force)


def give_report(vae: VideoVAE, args: argparse.Namespace) -> None:
    """Print the report with --verbose, and write it with --json; say so where nothing was computed."""
    if vae.last_report is None:
        if args.verbose or args.report is not None:
            log.warn("no report: this process has computed nothing")
        return
    if args.verbose:
        print(vae.last_report.text())
    text = json.dumps(vae.last_report.as_dict(), indent=1)
    if args.report == "-":
        print(text, file=args.stdout)
    elif args.report is not None:
        write_text(args.report, text + "\n")


@contextmanager
def progress(label: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a progress callback: a tqdm bar on a terminal, elsewhere an occasional line on stderr."""
    if quiet or sys.stderr is None:
        yield lambda done, total: None
    elif not sys.stderr.isatty():
        with Lines(label) as lines:
            yield lines
    else:
        from tqdm import tqdm

        with tqdm(desc=label, unit="") as bar:

            def report(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield report


class Lines:
    """Progress lines on stderr, printed by a thread, because one chunk may take minutes."""

    #: Seconds until the first line, and largest number of seconds between two.
    FIRST, LONGEST = 10.0, 120.0

    def __init__(self, label: str) -> None:
        self._label, self._began, self._reached = label, time.monotonic(), (0, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._say, name=f"progress of {label}", daemon=True)

    def __enter__(self) -> Lines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def __call__(self, done: int, total: int) -> None:
        """Note the progress, as the engine's callback; total 0: unknown."""
        self._reached = done, total

    @classmethod
    def waits(cls) -> Iterator[float]:
        """Yield the seconds from one line to the next; they grow, so that a day of work does not print thousands."""
        wait = cls.FIRST
        while True:
            yield wait
            wait = min(2 * wait, cls.LONGEST)

    def line(self) -> str:
        """Return a line with the steps done and the seconds since the start."""
        done, total = self._reached
        of = f"{done} of {total} steps ({done / total:.0%})" if total else f"{done} steps"
        return f"{self._label}: {of} in {time.monotonic() - self._began:.0f} s"

    def _say(self) -> None:
        for wait in self.waits():
            if self._over.wait(wait):
                return
            with suppress(OSError, ValueError):  # stderr may be closed
                print(self.line(), file=sys.stderr, flush=True)
