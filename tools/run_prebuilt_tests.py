"""Run GPU tests with prebuilt kernels alone: Triton's import fails in them and in every process that they start.

    PYTHONPATH=FOLDER python tools/run_prebuilt_tests.py [--form C] [--sets DIR] [pytest's arguments]

FOLDER holds this checkout as zerowaste_vae. DIR is what `tools/build_kernels.py --tests --out DIR` made: the sets with
the kernels of the tests' models, without which most tests are skipped. Without arguments for pytest all GPU tests of
the engine run. Prints what was skipped and why; a test is skipped where a kernel that it needs is in no set.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from zerowaste_vae.engine.kernels import cards
from zerowaste_vae.engine.kernels.prebuilt import library

ROOT = Path(__file__).resolve().parents[1]
USUAL = ("-q", "-rs", "--no-header", "-p", "no:cacheprovider", "-m", "gpu")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--form", default="C", choices=sorted(cards.FORMS), help="what runs (default: C)")
    parser.add_argument("--sets", type=Path, help="folder of the sets (default: those that ship)")
    args, rest = parser.parse_known_args(argv)
    made = {**os.environ, cards.VARIABLE: args.form}
    if args.sets:
        made[library.VARIABLE] = str(args.sets.resolve())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n", encoding="utf-8")
        made["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "pytest", *USUAL, *(rest or ["tests/engine"])]
        return subprocess.run(command, cwd=ROOT, env=made).returncode


if __name__ == "__main__":
    sys.exit(main())
