"""The whole check of tools/check_kernels_gpu.py: every kernel and shipped schedule on a real GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOL = Path(__file__).parents[3] / "tools" / "check_kernels_gpu.py"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_every_kernel_and_schedule():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(TOOL)], env=environment, capture_output=True, text=True)
    bad = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 0, "\n".join(bad) or done.stderr[-2000:]
