"""Work that GPU tests do in processes of their own, which may begin long before the test that asks for it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
NO_COMPILER = """
import logging, sys
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
import torch
from gpu_models import make
vae = make("seedvr2-small", "fp16")
z = torch.randn(1, 16, 2, 8, 8, generator=torch.Generator().manual_seed(0))
for _ in range(2):
    frames = vae.decode(z)
exact = make("seedvr2-small", "fp32").decode(z)
print("error", float((frames - exact).abs().max()))
print("mode", vae.last_report.mode)
"""


def without_a_compiler() -> subprocess.CompletedProcess[str]:
    """Two decodes where every C compiler fails and nothing is compiled yet."""
    with tempfile.TemporaryDirectory() as empty:
        return python("-c", NO_COMPILER, CC=shutil.which("false"), TRITON_CACHE_DIR=empty)


def under_cuda_malloc_async() -> subprocess.CompletedProcess[str]:
    """The tests of graphs that are for the other allocator."""
    tests = HERE.parent / "extras" / "graphs" / "test_graphs_gpu.py"
    return inner(tests, "other_one", PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")


def emulated(kind: str) -> subprocess.CompletedProcess[str]:
    """8 bit on a CPU beside the kernels: most of it is the CPU's work, 12 s of all cores."""
    return inner(HERE.parent / "precision" / "test_precision_gpu.py", f"inside and {kind}", OMP_NUM_THREADS="2")


def inner(file: Path, which: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Tests that run nowhere else."""
    pytest = "-m", "pytest", str(file), "-q", "-m", "gpu", "-p", "no:cacheprovider", "-k", which
    return python(*pytest, ZEROWASTE_INNER="1", **environment)


def long_clips() -> subprocess.CompletedProcess[str]:
    """Measure the host memory of long decodes."""
    return python(str(HERE / "host_memory.py"))


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Importing as this process does, and from tests/engine. Raises subprocess.TimeoutExpired after 240 s."""
    paths = os.pathsep.join(path for path in (*sys.path, str(HERE.parent)) if path)
    return subprocess.run([sys.executable, *arguments], env={**os.environ, **environment, "PYTHONPATH": paths},
                          capture_output=True, text=True, timeout=240)  # fmt: skip


#: Test -> what it runs.
PROCESSES = {
    "test_without_a_compiler_torch_runs": without_a_compiler,
    "test_under_cuda_malloc_async": under_cuda_malloc_async,
    "test_host_memory_of_long_clips": long_clips,
    **{f"test_emulation[{kind}]": functools.partial(emulated, kind)
       for kind in ("fp8", "int8")},
}
