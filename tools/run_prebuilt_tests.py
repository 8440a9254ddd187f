"""Run GPU tests with prebuilt kernels alone: Triton's import fails in them and in every process that they start.

    PYTHONPATH=FOLDER python tools/run_prebuilt_tests.py [--form C] [--sets DIR] [--warm N] [pytest's arguments]

FOLDER holds this checkout as zerowaste_vae. DIR is what `tools/build_kernels.py --tests --out DIR` made: the sets with
the kernels of the tests' models, without which most tests are skipped. Without arguments for pytest all GPU tests of
the engine run. Prints what was skipped and why; a test is skipped where a kernel that it needs is in no set.

The driver finishes each kernel once, a second of one core, and keeps it on disk. Processes of tests that begin together
all finish the same ones: with --warm N, N processes run each of the tests' models first, and no tests. Give N a quarter
of the cores, as each process compiles in several threads.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zerowaste_vae.engine.kernels import cards
from zerowaste_vae.engine.kernels.prebuilt import library

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "engine"
USUAL = ("-q", "-rs", "--no-header", "-p", "no:cacheprovider", "-m", "gpu")
#: Room for all of them in the driver's cache, in bytes.
CACHE = 4 << 30


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--form", default="C", choices=sorted(cards.FORMS), help="what runs (default: C)")
    parser.add_argument("--sets", type=Path, help="folder of the sets (default: those that ship)")
    parser.add_argument("--warm", type=int, metavar="N", help="finish the kernels in N processes instead of testing")
    args, rest = parser.parse_known_args(argv)
    made = {**os.environ, cards.VARIABLE: args.form, "CUDA_CACHE_MAXSIZE": str(CACHE)}
    if args.sets:
        made[library.VARIABLE] = str(args.sets.resolve())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n", encoding="utf-8")
        made["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        if args.warm:
            return warm(args.warm, made)
        command = [sys.executable, "-m", "pytest", *USUAL, *(rest or ["tests/engine"])]
        return subprocess.run(command, cwd=ROOT, env=made).returncode


def warm(processes: int, environment: dict[str, str]) -> int:
    """Run each of the tests' models once. Returns how many of them failed; the reasons are printed."""
    sys.path.insert(0, str(TESTS))
    from warm_kernels import CELLS

    made = environment | {"PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], str(TESTS)])}

    def one(cell: tuple[str, ...]) -> int:
        command = [sys.executable, str(TESTS / "warm_kernels.py"), *cell]
        done = subprocess.run(command, cwd=ROOT, env=made, capture_output=True, text=True)
        if done.returncode:
            print(f"{' '.join(cell)}: {done.stderr[-500:]}")
        return int(done.returncode != 0)

    with ThreadPoolExecutor(processes) as pool:
        return sum(pool.map(one, CELLS))


if __name__ == "__main__":
    sys.exit(main())
