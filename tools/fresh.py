"""Get from a clean clone to a running program: make a virtual environment, install, run.

    python3 tools/fresh.py demo --out demo_out     any zerowaste-vae command
    python3 tools/fresh.py test                    the core of the tests
    python3 tools/fresh.py test tests              all of them; more arguments go to pytest

It needs Python 3.10 to 3.13 and pip's usual access to packages, nothing else. The environment is .venv in the
repository (--venv DIR for another); once installed, later runs start at once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"  # installed when the environment has no torch yet
STAMP = "zerowaste-installed"  # holds a digest of the installation
_QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Make a virtual environment, install the pack into it and run it.",
        epilog="Example: python3 tools/fresh.py demo --out demo_out",
    )
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="environment to make or use (default: .venv)")
    parser.add_argument("--plain", action="store_true", help="install a copy of the pack, not a link to this folder")
    parser.add_argument("command", help="test, or a zerowaste-vae command such as demo")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on")
    args = parser.parse_args()
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        return _fail(f"Python 3.10 to 3.13 is needed, this is {sys.version.split()[0]}; start it with another python3")
    try:
        python = prepare(args.venv.absolute(), args.plain)
        if args.command == "test":
            # One process a core and one thread a process: small tensors gain nothing from threads and lose much when
            # those of several processes share a core.
            once = {"OMP_NUM_THREADS": "1", **os.environ}
            pytest = [python, "-m", "pytest", "-n", "auto", "--dist", "worksteal"]
            return subprocess.call([*pytest, *(args.arguments or ["-m", "core"])], cwd=ROOT, env=once)
        return subprocess.call([python, "-m", "zerowaste_vae", args.command, *args.arguments])
    except subprocess.CalledProcessError as error:
        return _fail(f"this step failed, see above: {' '.join(map(str, error.cmd))}")
    except KeyboardInterrupt:
        return 130


def prepare(venv: Path, plain: bool) -> Path:
    """Return the path of the environment's Python, with torch and the pack installed in it. Raises
    CalledProcessError."""
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = venv / STAMP
    wanted = digest(plain)
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    # An interrupted environment may have no pip yet.
    if not python.exists() or subprocess.call([python, "-m", "pip", "--version"], **_QUIET):
        print(f"Making a virtual environment in {venv}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    if subprocess.call([python, "-c", "import torch"], stderr=subprocess.DEVNULL):
        print(f"Installing {TORCH}", flush=True)
        subprocess.run([*pip, TORCH], check=True)
    print("Installing the pack and what its tests need", flush=True)
    target = f"{ROOT}[standalone,test]"
    subprocess.run([*pip, target] if plain else [*pip, "--editable", target], check=True)
    stamp.write_text(wanted)
    return python


def digest(plain: bool) -> str:
    """Return a text that changes when another installation is due: other requirements, place or kind of
    installation."""
    parts = ((ROOT / "pyproject.toml").read_bytes(), str(ROOT).encode(), TORCH.encode(), str(plain).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _fail(message: str) -> int:
    print(f"fresh.py: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
