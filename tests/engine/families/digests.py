"""Digests of what a small network of every family gives on a CPU, fused (by the reference operators) and plain, under
every kind of plan: they show if a change moved a bit.

    PYTHONPATH=FOLDER python -m zerowaste_vae.tests.engine.families.digests OLD.json                        before it
    PYTHONPATH=FOLDER python -m zerowaste_vae.tests.engine.families.digests NEW.json --compare OLD.json     after it

FOLDER holds the checkout to examine as zerowaste_vae. A line is printed for every case that differs, with exit status
1. Bits are those of one kind of CPU and one torch: compare records of one machine only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from zerowaste_vae import PlanError, VideoVAE, load
from zerowaste_vae.engine.options import DEFAULTS

from .small import SMALL, small

GIB = 1 << 30
#: Families that have 8 bit, of the kinds that differ: causal in time, with own strides, pictures.
INT8 = ("seedvr2", "wan2.2", "flux")
#: Latents [T, h, w]; the windows of LTX-2.5 take time on a CPU.
SIZE, LAST_OF_LTX = (3, 4, 5), (2, 2, 4)
#: Targets in shares of the peak that "roomy" has: as tight as whole frames still fit.
SHARES = tuple(share / 20 for share in range(19, 4, -1))


def cases(name: str, precision: str, kind: str) -> Iterator[tuple[str, str]]:
    """Yield (case, digest) of one family in one way to run."""
    vae = load(small(name), precision, "cpu")
    if kind == "plain":
        vae = vae.with_options(DEFAULTS.switched(off=["triton_fusion"]))
    z, video = inputs(vae)
    tiles = {"tiling": "blended", "tile": 3 * vae.spatial, "overlap": vae.spatial}
    first = f"{name} {precision} {kind}"
    for what, options in {"whole": {}, "chunk 1": {"chunk": 1}, "tiles": tiles}.items():
        yield f"{first} decode {what}", digest(vae.decode(z, **options))
    frames = vae.frames(z.shape[2])
    if frames > 4 and not vae.architecture.still:
        yield f"{first} decode part", digest(vae.decode(z, chunk=2, start=3, frames=2))
    yield f"{first} decode tight", digest(vae.decode(z, tiling="untiled", **tightest(vae, z)))
    if vae.can_encode:
        for what, options in {"whole": {}, "chunk 1": {"chunk": 1}, "tiles": tiles}.items():
            yield f"{first} encode {what}", digest(vae.encode(video, **options))


def tightest(vae: VideoVAE, z: Tensor) -> dict[str, float]:
    """Return the options of the lowest target under which whole frames still fit."""
    options, roomy = {}, vae.plan_decode(*z.shape[2:]).peak_bytes / GIB
    for share in SHARES:
        tried = {"vram_gb": share * roomy}
        try:
            vae.plan_decode(*z.shape[2:], tiling="untiled", **tried)
        except PlanError:
            break
        options = tried
    return options


def inputs(vae: VideoVAE) -> tuple[Tensor, Tensor]:
    """Return a seeded latent [1, C, T, h, w] and frames [1, F, H, W, colours] in 0..1, whole 255ths."""
    size = LAST_OF_LTX if vae.arch == "ltx-diffusion" else SIZE
    count = 1 if vae.architecture.still else 7 if vae.architecture.temporal == 1 else size[0]
    h, w = (n * vae.architecture.side for n in size[1:])
    seeded = torch.Generator().manual_seed(1)
    z = torch.randn(1, vae.latent_channels, count, h, w, generator=seeded)
    shape = (1, vae.frames(count), h * vae.spatial, w * vae.spatial, 3)
    return z, torch.randint(0, 256, shape, generator=seeded) / 255


def digest(out: Tensor) -> str:
    return hashlib.sha256(out.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()[:16]


def record() -> dict[str, str]:
    """Return {case: digest} of all families."""
    ways = [(name, "fp32", kind) for name in SMALL for kind in ("fused", "plain")]
    ways += [(name, "int8", "fused") for name in INT8]
    with mock.patch("zerowaste_vae.engine.execution.core.why_off", lambda *_: None):
        return {case: found for way in ways for case, found in cases(*way)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Record digests of small networks on a CPU, and compare two records.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--compare", type=Path, metavar="OLD", help="print what differs from this earlier record")
    args = parser.parse_args(argv)
    old = json.loads(args.compare.read_text(encoding="utf-8")) if args.compare else None
    torch.set_num_threads(1)
    found = record()
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if old is None:
        return 0
    differ = (case for case in old | found if old.get(case) != found.get(case))
    lines = [f"{case}: {old.get(case)} -> {found.get(case)}" for case in differ]
    print("\n".join(lines) if lines else f"{len(found)} cases: no bit differs")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
