"""Beside many GPU tests: their kernels, compiled side by side."""

from __future__ import annotations

import os
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from zerowaste_vae.engine.kernels import targets
from zerowaste_vae.engine.kernels.prebuilt.errors import PrebuiltError
from zerowaste_vae.engine.kernels.targets import triton_version
from zerowaste_vae.engine.planning.choice import Choices

from .execution.own_processes import PROCESSES, python
from .kernels.checks import PARTS, check
from .warm_kernels import CELLS

CHECKS = "test_kernels_gpu.py"
#: Fewer tests than this compile what they need themselves.
MANY = 30
#: Processors for the tests themselves while others compile on the rest, two by two of one core; and threads of torch:
#: those that wait for each other on processors that are taken made one test twice as long (10 s and 22).
OWN, OWN_THREADS, THREADS = 4, 3, torch.get_num_threads()
BEGUN, POOL = pytest.StashKey(), pytest.StashKey()


@pytest.hookimpl(tryfirst=True)  # before what was asked for on the command line
def pytest_collection_modifyitems(items):
    """Tests that need no kernels come first, then those whose kernels are compiled first, so that hardly any waits."""
    order = list(dict.fromkeys(model for model, *_ in CELLS))

    def place(item):
        wanted = max(map(order.index, models(item)), default=-1)
        return item.get_closest_marker("gpu") is not None, wanted, item.path.name == CHECKS

    if crowd(items):
        items.sort(key=place)


def crowd(items):
    """Decide if so many tests run on a GPU that compiling beside them pays."""
    if sum(item.get_closest_marker("gpu") is not None for item in items) < MANY or not torch.cuda.is_available():
        return False
    return triton_version() is not None and torch.cuda.get_device_properties(0).total_memory > 64 << 30


def models(item):
    """Those whose kernels a test takes: what its module names in WARM, or all of them; none where it is of plain torch,
    or its module mostly for a CPU."""
    if item.get_closest_marker("plain"):
        return ()
    everything = dict.fromkeys(model for model, *_ in CELLS) if item.module.__name__.endswith("_gpu") else ()
    return getattr(item.module, "WARM", everything)


def compile_one(cell):
    """Return what went wrong, or None. It only saves time, and fails again in a test."""
    try:
        done = python(str(Path(__file__).with_name("warm_kernels.py")), *cell, OMP_NUM_THREADS="1")
    except subprocess.TimeoutExpired:
        return f"{cell}: not done in 240 s"
    return f"{cell}: {done.stderr[-500:]}" if done.returncode else None


def run_own(name):
    return PROCESSES[name]()


def elsewhere():
    """This thread, and what it starts, keep away from the tests' processors."""
    if hasattr(os, "sched_setaffinity"):
        every = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, every[OWN:] or every)


def begun(session):
    """{what: {its argument: the future of it}}, in processes of one core each, on cards that hold all of them: what
    tests run in their own, then the kernels of every cell and the checks of kernels, as tests ask for them first."""
    if BEGUN not in session.stash:
        session.stash[BEGUN] = {}
        if crowd(session.items):
            session.stash[POOL] = pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - OWN), initializer=elsewhere)
            torch.set_num_threads(OWN_THREADS)
            session.stash[BEGUN] = made = {run_own: {}, compile_one: {}, check: {}}
            for work, argument in jobs(session.items):
                made[work][argument] = pool.submit(work, argument)
    return session.stash[BEGUN]


def jobs(items):
    """(function, argument) in the order in which they are to begin, for tests in any order."""
    names, first = {item.name for item in items}, {}
    for at, item in enumerate(items):
        for what in (*models(item), *([CHECKS] if item.path.name == CHECKS else ())):
            first.setdefault(what, at)
    made = [(first.get(cell[0], len(items)), compile_one, cell) for cell in CELLS]
    made += [(first[CHECKS], check, part) for part in PARTS if CHECKS in first]
    made.sort(key=lambda job: job[0])
    return [(run_own, name) for name in PROCESSES if name in names] + [job[1:] for job in made]


#: Why a prebuilt set could not run what a test asked for, in its fixtures or itself.
LACKING: list[str] = []


@pytest.fixture
def lacking():
    """Those notes: a test that makes one set fail forgets what the next ones lack."""
    return LACKING


@pytest.fixture(scope="session", autouse=True)
def prebuilt_alone():
    """Without Triton GPU tests run prebuilt kernels, and note what no set has."""
    if triton_version() is not None or not torch.cuda.is_available():
        yield
        return
    of = Choices.of

    def noting(self, half):
        here = of(self, half)
        exact = self._walk.dtype == torch.float32  # a reference: no set has kernels for it
        if here is not None and not here.kernels and not exact and "lacks kernels" in here.notes[0]:
            LACKING.append(here.notes[0])
        return here

    Choices.of = noting
    yield
    Choices.of = of


@pytest.fixture(autouse=True)
def every_way():
    """What fails in a test runs again in the next one."""
    yield
    if targets._off:
        targets._off.clear()
        targets._ways.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test whose kernels no set has proves nothing of them in plain torch: it is skipped, and says what lacks."""
    try:
        result = yield
    except PrebuiltError as error:
        if "lacks a kernel" not in str(error):
            raise
        pytest.skip(str(error)[:200])
    except Exception:
        if not LACKING:
            raise
    if LACKING:
        pytest.skip(LACKING[0])
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Print failures on a GPU at once: a run that is cut off has no summary."""
    report = yield
    if report.failed and item.get_closest_marker("gpu"):
        item.config.get_terminal_writer().write(f"\n{report.longreprtext[-1500:]}\n", flush=True)
    return report


def pytest_sessionfinish(session):
    if POOL in session.stash:
        session.stash[POOL].shutdown(cancel_futures=True)
        torch.set_num_threads(THREADS)


@pytest.fixture(scope="session")
def side_by_side(request):
    return begun(request.session)


@pytest.fixture
def own_process(request, side_by_side):
    """Run this test's work in a process of its own; return a function of how that ended."""
    begun_before = side_by_side.get(run_own)
    return begun_before[request.node.name].result if begun_before else lambda: run_own(request.node.name)


@pytest.hookimpl(tryfirst=True)  # before fixtures, which may run kernels
def pytest_runtest_setup(item):
    """A test waits for the kernels of its models, and gets all cores once nothing is compiled any more."""
    LACKING.clear()
    futures = begun(item.session)
    if futures and all(future.done() for each in futures.values() for future in each.values()):
        torch.set_num_threads(THREADS)
    for (model, *_), future in futures.get(compile_one, {}).items():
        if model in models(item) and (trouble := future.result()):
            warnings.warn(f"kernels were not compiled beforehand: {trouble}", stacklevel=1)
