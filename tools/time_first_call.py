"""Time the first call of every kernel a decode needs: with an empty Triton cache, then in a new process with it warm.

Run on a GPU: python tools/time_first_call.py [fp16|fp8] (package importable as zerowaste_vae).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

import torch
from zerowaste_vae.engine.kernels.attention import attention
from zerowaste_vae.engine.kernels.conv3d import Epilogue, conv3d, pack_weight, padded_channels
from zerowaste_vae.engine.kernels.norm_act import Norm, Store, norm_act, statistics
from zerowaste_vae.engine.kernels.targets import FP8
from zerowaste_vae.engine.kernels.to_pixels import to_pixels
from zerowaste_vae.engine.kernels.upsample import pack, upsample

DEVICE = torch.device("cuda")
# Per stage at 720p: H, W and its convolutions (C, K, kernel rows, residual, statistics); one frame each.
STAGES = (
    (90, 160, ((512, 512, 3, False, True), (512, 512, 3, True, True), (512, 512, 3, True, False))),
    (180, 320, ((512, 512, 3, False, True), (512, 512, 3, True, True), (512, 512, 3, True, False))),
    (360, 640, ((512, 256, 3, False, True), (256, 256, 3, False, True), (256, 256, 3, True, True),
                (256, 256, 3, True, False), (512, 256, 1, False, False))),
    (720, 1280, ((256, 128, 3, False, True), (128, 128, 3, False, True), (128, 128, 3, True, True),
                 (256, 128, 1, False, False))),
)  # fmt: skip


def frames(dtype: torch.dtype, slots: int, h: int, w: int, c: int) -> torch.Tensor:
    return torch.zeros(slots, h + 2, w + 2, padded_channels(c, dtype), device=DEVICE, dtype=torch.float16).to(dtype)


def decoder(dtype: torch.dtype) -> None:
    """Call each kernel variant once; first and last convolution, shortcuts and attention stay in fp16."""
    half = torch.float16
    first = pack_weight(torch.randn(512, 16, 3, 3, 3, device=DEVICE), half)
    conv3d(frames(half, 3, 90, 160, 16), first, torch.empty(1, 90, 160, 512, device=DEVICE, dtype=half),
           epilogue=Epilogue(torch.randn(512, device=DEVICE), groups=32))
    for h, w, convs in STAGES:
        for c, k, kernel, residual, sums in convs:
            kind = dtype if kernel == 3 else half
            x = frames(kind, kernel, h, w, c)
            weight = pack_weight(torch.randn(k, c, *(kernel,) * 3, device=DEVICE), kind)
            out = torch.empty(1, h, w, k, device=DEVICE, dtype=half)
            conv3d(x, weight, out, epilogue=Epilogue(torch.randn(k, device=DEVICE), out if residual else None,
                                                     32 if sums else 0))
            norm = Norm(weight=torch.ones(k, device=DEVICE), bias=torch.ones(k, device=DEVICE))
            norm_act(out, norm, frames(dtype, 1, h, w, k), store=Store())
            statistics(out, 32)
    for h, w, c, z in ((90, 160, 512, 2), (180, 320, 512, 2), (360, 640, 256, 1)):
        composed = pack(torch.randn(4 * z * c, c, 1, 1, 1, device=DEVICE), torch.randn(4 * z * c, device=DEVICE),
                        torch.randn(c, c, 3, 3, 3, device=DEVICE), torch.randn(c, device=DEVICE), dtype)
        upsample(frames(dtype, 3, h, w, c)[: 2 if z == 2 else 3], composed,
                 torch.empty(z, 2 * h, 2 * w, c, device=DEVICE, dtype=half), first=2, groups=32)
    to_pixels(frames(half, 3, 720, 1280, 128), pack_weight(torch.randn(3, 128, 3, 3, 3, device=DEVICE), half),
              torch.zeros(3, device=DEVICE), torch.empty(1, 720, 1280, 3, device=DEVICE))
    q = torch.randn(1, 14400, 512, device=DEVICE, dtype=half)
    attention(q, q, q)
    torch.cuda.synchronize()


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else "fp16"
    dtype = {"fp16": torch.float16, "fp8": FP8}[name]
    if os.environ.get("TIME_FIRST_CALL"):
        import triton  # noqa: F401  (its import is not part of the figure)

        torch.zeros(1, device=DEVICE)
        torch.mm(*[torch.zeros(64, 64, device=DEVICE)] * 2)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        decoder(dtype)
        print(f"{name} {os.environ['TIME_FIRST_CALL']} cache: {time.perf_counter() - begin:.2f} s", flush=True)
        return 0
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            environment = os.environ | {"TRITON_CACHE_DIR": cache, "TIME_FIRST_CALL": state}
            subprocess.run([sys.executable, __file__, name], env=environment, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
