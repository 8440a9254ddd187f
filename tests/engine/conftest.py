"""Before many GPU tests: their kernels, compiled side by side."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from .warm_kernels import CELLS

#: Fewer tests than this compile what they need themselves.
MANY = 30


@pytest.fixture(scope="session", autouse=True)
def compiled(request):
    """In processes of one core each, on cards that hold all of them. They only save time: what fails here is said, and
    fails again in a test."""
    many = sum(item.get_closest_marker("gpu") is not None for item in request.session.items) >= MANY
    if not many or not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 64 << 30:
        return
    script = str(Path(__file__).with_name("warm_kernels.py"))
    paths = os.pathsep.join(path for path in sys.path if path)

    def compile_one(cell):
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run([sys.executable, script, *cell], env=environment, capture_output=True, text=True,
                                  timeout=180)  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{cell}: not done in 180 s"
        return f"{cell}: {done.stderr[-500:]}" if done.returncode else None

    with ThreadPoolExecutor(min(len(CELLS), os.cpu_count() or 1)) as pool:
        for trouble in filter(None, pool.map(compile_one, CELLS)):
            warnings.warn(f"kernels were not compiled beforehand: {trouble}", stacklevel=1)
