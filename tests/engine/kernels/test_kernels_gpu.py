"""tools/check_kernels_gpu.py: every kernel and shipped schedule on a real GPU."""

import pytest
import torch
from zerowaste_vae.engine.kernels.targets import triton_version

from .checks import PARTS, TOOL, check


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.skipif(triton_version() is None, reason="Triton's compiler makes a kernel of each schedule")
@pytest.mark.parametrize("part", PARTS)
def test_every_kernel_and_schedule(side_by_side, part):
    checks = side_by_side.get(check)
    done = checks[part].result() if checks else check(part)
    bad = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 0, "\n".join(bad) or done.stderr[-2000:]


def test_no_part_is_left_out(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import check_kernels_gpu as tool

    assert set(tool.PARTS) == set(PARTS) and len(set(PARTS)) == len(PARTS)
