"""tools/check_kernels_gpu.py: every kernel and shipped schedule on a real GPU."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

TOOL = Path(__file__).parents[3] / "tools" / "check_kernels_gpu.py"
PARTS = ("forms_fp16", "forms_bf16", "forms_fp8", "forms_int8", "schedules_fp16", "schedules_bf16", "schedules_fp8",
         "schedules_int8", "clip_starts", "ends", "norms", "ups", "nearest", "attentions", "other_generations",
         "beyond_32_bits", "invariance", "winograd_fp16", "winograd_bf16", "winograd_fp8", "winograd_int8",
         "winograd_others")  # fmt: skip


def check(part):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, str(TOOL), part], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def checks():
    """Part -> its process to be. Each compiles on one core, so they run side by side where the card holds them all."""
    roomy = torch.cuda.get_device_properties(0).total_memory > 64 << 30
    torch.cuda.empty_cache()
    pool = ThreadPoolExecutor(min(len(PARTS), os.cpu_count() or 1) if roomy else 1)
    yield {part: pool.submit(check, part) for part in PARTS}
    pool.shutdown(cancel_futures=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("part", PARTS)
def test_every_kernel_and_schedule(checks, part):
    done = checks[part].result()
    bad = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 0, "\n".join(bad) or done.stderr[-2000:]


def test_no_part_is_left_out():
    (listed,) = re.findall(r"^PARTS = \{(.*?)\}", TOOL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert tuple(re.findall(r'"(\w+)":', listed)) == PARTS
