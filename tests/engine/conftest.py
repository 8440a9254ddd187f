"""Beside many GPU tests: their kernels, compiled side by side."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from .kernels.checks import PARTS, check
from .warm_kernels import CELLS

CHECKS = "test_kernels_gpu.py"
#: Fewer tests than this compile what they need themselves.
MANY = 30
#: Cores, and threads of torch, for the tests themselves while others compile: threads that wait for each other on cores
#: that are taken made one of them twice as long (10 s and 22).
OWN, THREADS = 3, torch.get_num_threads()


@pytest.hookimpl(tryfirst=True)  # before what was asked for on the command line
def pytest_collection_modifyitems(items):
    """Tests whose kernels are compiled first come first, so that hardly any waits."""
    order = list(dict.fromkeys(model for model, *_ in CELLS))

    def place(item):
        wanted = max(map(order.index, models(item.module)), default=-1)
        return item.get_closest_marker("gpu") is not None, wanted, item.path.name == CHECKS

    if crowd(items):
        items.sort(key=place)


def crowd(items):
    """Whether so many run on a GPU that it pays, on one that holds the tests and all that compiles."""
    if sum(item.get_closest_marker("gpu") is not None for item in items) < MANY or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_properties(0).total_memory > 64 << 30


def models(module):
    """Those whose kernels a module's tests take: what it names in WARM, or all of them; none where it is mostly for a
    CPU."""
    everything = dict.fromkeys(model for model, *_ in CELLS) if module.__name__.endswith("_gpu") else ()
    return getattr(module, "WARM", everything)


def compile_one(cell):
    """What went wrong, or None. It only saves time, and fails again in a test."""
    script = str(Path(__file__).with_name("warm_kernels.py"))
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run([sys.executable, script, *cell], env=environment, capture_output=True, text=True,
                              timeout=240)  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{cell}: not done in 240 s"
    return f"{cell}: {done.stderr[-500:]}" if done.returncode else None


@pytest.fixture(scope="session")
def side_by_side(request):
    """{what: {its argument: the future of it}}, in processes of one core each, on cards that hold all of them: first
    the kernels of every cell, then the checks of kernels, which wait for nothing."""
    if not crowd(request.session.items):
        yield {}
        return
    checked = any(item.path.name == CHECKS for item in request.session.items)
    pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - OWN))
    torch.set_num_threads(OWN)
    yield {
        compile_one: {cell: pool.submit(compile_one, cell) for cell in CELLS},
        check: {part: pool.submit(check, part) for part in PARTS if checked},
    }
    pool.shutdown(cancel_futures=True)
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="module", autouse=True)
def compiled(request, side_by_side):
    """A module's tests wait for the kernels of their models, and get all cores once nothing is compiled any more."""
    if side_by_side and all(future.done() for futures in side_by_side.values() for future in futures.values()):
        torch.set_num_threads(THREADS)
    for (model, *_), future in side_by_side.get(compile_one, {}).items():
        if model in models(request.module) and (trouble := future.result()):
            warnings.warn(f"kernels were not compiled beforehand: {trouble}", stacklevel=1)
