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

#: Fewer tests than this compile what they need themselves.
MANY = 30


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
    gpu = [item for item in request.session.items if item.get_closest_marker("gpu") is not None]
    if len(gpu) < MANY or not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 64 << 30:
        yield {}
        return
    checked = any(item.path.name == "test_kernels_gpu.py" for item in gpu)
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    yield {
        compile_one: {cell: pool.submit(compile_one, cell) for cell in CELLS},
        check: {part: pool.submit(check, part) for part in PARTS if checked},
    }
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module", autouse=True)
def compiled(request, side_by_side):
    """A module's tests wait for the kernels of the models that it names in WARM, or of all."""
    models = getattr(request.module, "WARM", None)
    for (model, *_), future in side_by_side.get(compile_one, {}).items():
        if (models is None or model in models) and (trouble := future.result()):
            warnings.warn(f"kernels were not compiled beforehand: {trouble}", stacklevel=1)
