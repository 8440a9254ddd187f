"""Run the GPU tests in several processes at once on every GPU of this machine, and go on where an earlier run ended.

    PYTHONPATH=FOLDER python tools/run_gpu_tests.py [--each N] [--limit S] [--done FILE] [pytest's arguments]

FOLDER holds this checkout as zerowaste_vae. A process takes some files of tests, one after the other. What failed runs
once more alone on its GPU at the end: a test that fails only beside others has met a full card. FILE lists what has
passed; it is read first and written after every process, so that a run that is cut off loses little. Exit status 1: a
test failed, also alone; 2: the limit came first.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
USUAL = ("-m", "gpu", "-q", "-rfE", "--no-header", "-p", "no:cacheprovider")
#: Tests of one process: from 30 on they compile kernels beside themselves on all cores, each process for itself, and
#: some take 20 s each.
BATCH = 15
#: What pytest exits with where all tests ran, some failed, or there were none.
ALL_RAN = (0, 1, 5)
#: Seconds within which no new process begins before the limit.
LAST = 30.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=4, metavar="N", help="processes on each GPU (default: 4)")
    parser.add_argument("--limit", type=float, default=3e7, metavar="S", help="seconds after which none runs")
    parser.add_argument("--done", type=Path, metavar="FILE", help="names of tests that have passed")
    args, rest = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(args.done or Path(folder) / "done", rest, time.monotonic() + args.limit)
        left = run.collect()
        print(f"{len(left)} tests to run, {len(run.passed)} have passed before", flush=True)
        failed = run.side_by_side(list(batches(left)), gpus(), args.each)
        again = [name for name in failed if run.alone(name)]
    late = run.out_of_time()
    print(f"{len(run.passed)} passed, {len(failed)} failed beside others, of these {len(again)} alone"
          f"{'; the limit came first' * late}", flush=True)  # fmt: skip
    return 1 if again else 2 if late else 0


class Run:
    """One run: what has passed, and until when processes may begin."""

    def __init__(self, done: Path, arguments: list[str], end: float) -> None:
        """done: file of the names that have passed. arguments: for pytest. end: in seconds of time.monotonic()."""
        self._done, self._arguments, self._end, self._lock = done, arguments, end, threading.Lock()
        self.passed = set(done.read_text(encoding="utf-8").splitlines()) if done.exists() else set()

    def collect(self) -> list[str]:
        """Return the names of the tests that have not passed."""
        command = [sys.executable, "-m", "pytest", *USUAL, "--collect-only", *(self._arguments or ["tests/engine"])]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if found.returncode not in ALL_RAN:
            raise SystemExit(f"tests cannot be collected:\n{found.stdout[-3000:]}{found.stderr[-3000:]}")
        return [name for name in found.stdout.splitlines() if "::" in name and name not in self.passed]

    def side_by_side(self, work: Iterable[list[str]], devices: list[str], each: int) -> list[str]:
        """Run batches of tests in `each` processes on every device; return the names of those that failed."""
        waiting: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        for batch in work:
            waiting.put(batch)
        failed: list[str] = []

        def take(device: str) -> None:
            while not self.out_of_time():
                try:
                    batch = waiting.get_nowait()
                except queue.Empty:
                    return
                failed.extend(self._tests(batch, device))

        threads = [threading.Thread(target=take, args=(device,)) for _ in range(each) for device in devices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return failed

    def alone(self, name: str) -> bool:
        """Run one test by itself; return whether it failed again."""
        return self.out_of_time() or bool(self._tests([name], gpus()[0]))

    def out_of_time(self) -> bool:
        """Return whether no further process may begin."""
        return time.monotonic() > self._end - LAST

    def _tests(self, names: list[str], device: str) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            passed, begun = Path(folder) / "passed", time.monotonic()
            command = [sys.executable, "-m", "pytest", *USUAL, f"--passed={passed}", *names]
            # Torch takes a thread for each core otherwise, in every process, and those of one wait for each other.
            made = {"OMP_NUM_THREADS": "2", **os.environ, "CUDA_VISIBLE_DEVICES": device}
            try:
                done = subprocess.run(command, cwd=ROOT, env=made, capture_output=True, text=True,
                                      timeout=max(1.0, self._end - begun))  # fmt: skip
                text, ended = done.stdout + done.stderr, ""
            except subprocess.TimeoutExpired as late:
                text, ended = (late.stdout or b"").decode(errors="replace"), ", cut off"
            known = set(passed.read_text(encoding="utf-8").splitlines()) if passed.exists() else set()
            failed = failures(text)
            if not ended and done.returncode not in ALL_RAN:  # it died: what it has not passed has to run again
                failed = [name for name in names if name not in known]
        with self._lock:
            self.passed |= known
            self._done.write_text("".join(f"{name}\n" for name in sorted(self.passed)), encoding="utf-8")
            files = ", ".join(dict.fromkeys(Path(name.partition("::")[0]).stem for name in names))
            print(f"{time.monotonic() - begun:6.0f} s  {len(known)} passed, {len(failed)} failed{ended}: {files}")
            print(text[-3000:] if failed else "", end="", flush=True)
        return failed


def batches(names: list[str]) -> Iterator[list[str]]:
    """Yield at most BATCH tests at a time, of as few files as there can be."""
    files: dict[str, list[str]] = {}
    for name in names:
        files.setdefault(name.partition("::")[0], []).append(name)
    batch: list[str] = []
    parts = [tests[i : i + BATCH] for tests in files.values() for i in range(0, len(tests), BATCH)]
    for tests in sorted(parts, key=len, reverse=True):  # the longest first, so that none ends late
        if batch and len(batch) + len(tests) > BATCH:
            yield batch
            batch = []
        batch = batch + tests
    if batch:
        yield batch


def failures(text: str) -> list[str]:
    """Return the names of tests that failed, from what pytest prints with -rfE."""
    return list(dict.fromkeys(re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", text, re.MULTILINE)))


def gpus() -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


if __name__ == "__main__":
    sys.exit(main())
