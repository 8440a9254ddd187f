"""Measure a long clip as a stream, to nothing or to an MP4: milliseconds per frame next to `decode` of a shorter one,
and the process's memory on the way.

    python tools/measure_stream.py --frames 3001 --decode 241 --mp4 clip.mp4

Run it where the pack is importable as zerowaste_vae, on Linux. Weights are seeded ones of a family's published widths,
the last convolution's a fiftieth as large: frames of random weights are noise, and this much of it takes the bits of a
film (about one per pixel). Latents change slowly. Each part prints its line as it is done.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from fractions import Fraction
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from zerowaste_vae import VideoVAE, load
from zerowaste_vae.engine.archs import by_name
from zerowaste_vae.engine.bench.calls import Spread, in_turns, resident_bytes
from zerowaste_vae.engine.bench.subject import check_size, noise_latent, random_checkpoint
from zerowaste_vae.engine.checkpoints import Checkpoint
from zerowaste_vae.engine.errors import ZeroWasteError
from zerowaste_vae.engine.media.mp4 import Format, Mp4Writer


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--weights", default="seedvr2", metavar="FAMILY")
    parser.add_argument("--size", default="1280x720", metavar="WxH")
    parser.add_argument("--frames", type=int, default=3001, metavar="N", help="of the stream")
    parser.add_argument("--decode", type=int, default=241, metavar="N", help="frames of a decode (default: 241)")
    parser.add_argument("--runs", type=int, default=3, help="timed decodes, after a first one")
    parser.add_argument("--mp4", type=Path, metavar="FILE", help="write the stream to this file (default: nowhere)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args(argv)

    architecture = by_name(asked.weights)
    width, height = check_size(asked.size, architecture.spatial)
    vae = load(calm(random_checkpoint(architecture=architecture)), device=asked.device)

    def latents(frames: int) -> Tensor:
        count = (frames - 1) // architecture.temporal + 1
        return slow(noise_latent(vae.latent_channels, -(-count // 16) + 1, height // architecture.spatial,
                                 width // architecture.spatial), count)  # fmt: skip

    z = latents(asked.decode)
    seconds, made = in_turns({"decode": lambda: vae.decode(z, output="uint8")}, asked.runs, vae.device)
    count = made["decode"].shape[1]
    each = Spread.of(seconds["decode"][1:], 1e3 / count)
    print(f"decode of {count} frames: {each} ms a frame")
    del made

    z = latents(asked.frames)
    measured(vae, z, asked.mp4)
    if asked.mp4 is not None:
        print(f"{asked.mp4}: {asked.mp4.stat().st_size / 2**20:.1f} MiB")
    return 0


def calm(checkpoint: Checkpoint) -> Checkpoint:
    """Scale the last convolution of SeedVR2 and Wan, for frames with a fiftieth of the contrast."""
    for name in ("decoder.conv_out.weight", "decoder.head.2.weight"):
        if name in checkpoint.tensors:
            checkpoint.tensors[name] = checkpoint.tensors[name] * 0.02
    return checkpoint


def slow(noise: Tensor, count: int) -> Tensor:
    """Interpolate [1, C, n, h, w] in time to `count` latents."""
    flat = noise.movedim(2, -1).flatten(0, -2)[None]
    wide = F.interpolate(flat, count, mode="linear", align_corners=True)[0]
    return wide.view(*noise.shape[:2], *noise.shape[3:], count).movedim(-1, 2).contiguous()


def measured(vae: VideoVAE, z: Tensor, file: Path | None) -> None:
    """Time one run, and measure the memory at its first part, at frame 201 and at its end."""
    began, count, marks, waited = time.perf_counter(), 0, {}, 0.0
    writer = None if file is None else Mp4Writer(file, Format(Fraction(24)))
    with contextlib.closing(vae.stream(z, output="uint8")) as frames, writer or contextlib.nullcontext():
        for part in frames:
            if writer is not None:
                full = time.perf_counter()
                writer.write(part[0])
                waited += time.perf_counter() - full
            count += part.shape[1]
            if not marks or max(marks) < 201 <= count:
                marks[count] = resident_bytes()
    if writer is not None:
        writer.finish()
    took, marks[count] = time.perf_counter() - began, resident_bytes()
    memory = ", ".join(f"{size / 2**30:.3f} at frame {at}" for at, size in marks.items())
    said = "" if file is None else f" ({1e3 * waited / count:.2f} of them for the encoder)"
    print(f"{'stream' if file is None else 'MP4'} of {count} frames: {1e3 * took / count:.2f} ms a frame{said}; "
          f"GiB of the process: {memory}", flush=True)  # fmt: skip


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ZeroWasteError as error:
        sys.exit(f"error: {error}")
