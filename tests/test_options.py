"""The options of these tests themselves: another order, and runs that leave out what passed before."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Fast modules of four tests or more.
MODULES = ["tests/engine/kernels/test_exact.py", "tests/engine/system/test_hardware.py"]


def run(*options):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *MODULES, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def usual():
    return [line for line in run("--collect-only") if "::" in line]


def test_other_order(usual):
    """Another order has the same tests and modules whole."""
    shuffled = [line for line in run("--collect-only", "--shuffle=4") if "::" in line]
    assert shuffled != usual and sorted(shuffled) == sorted(usual)
    modules = [line.partition("::")[0] for line in shuffled]
    assert sum(a != b for a, b in pairwise(modules)) == 1


def test_what_passed_is_not_run_again(usual, tmp_path):
    path = tmp_path / "passed"
    run(f"--passed={path}", "-k", "test_exact")
    names = path.read_text().splitlines()
    assert sorted(names) == sorted(line for line in usual if "test_exact" in line)
    last = run(f"--passed={path}")[-1]
    assert f"{len(names)} deselected" in last and "passed" in last
    assert set(path.read_text().splitlines()) > set(names)
