"""tools/check_kernels_gpu.py in parts, a process each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[3] / "tools" / "check_kernels_gpu.py"
#: What takes longest first.
PARTS = ("forms_fp16", "winograd_fp16", "winograd_bf16", "winograd_large", "clip_starts", "forms_fp8", "forms_bf16",
         "forms_int8", "schedules_fp16", "schedules_bf16", "schedules_fp8", "schedules_int8", "ends", "norms", "ups",
         "nearest", "attentions", "other_generations", "beyond_32_bits", "invariance", "mma_schedules_fp16",
         "mma_schedules_int8", "mma_schedules_fp8", "mma_clip_starts", "mma_forms_fp16", "mma_forms_fp8",
         "mma_nearest", "mma_ups", "mma_forms_int8", "mma_forms_bf16", "mma_invariance", "tokens")  # fmt: skip


def check(part: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, str(TOOL), part], env=environment, capture_output=True, text=True)
