"""Run in a process of its own: a long clip to an MP4 and back to latents; prints what memory that took as JSON.

long_clip.py KIND FRAMES FOLDER: "trivial", a network that is next to nothing at 854x480, or "demo", the demo VAE at
64x64.
"""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path

import torch
from zerowaste_vae import demo_vae_path, load
from zerowaste_vae.engine.extras.bench.calls import resident_bytes
from zerowaste_vae.engine.extras.media.clips import Clip
from zerowaste_vae.engine.extras.media.latents import LatentFile, LatentWriter
from zerowaste_vae.engine.extras.media.mp4 import Format, Mp4Writer
from zerowaste_vae.engine.network.architecture import Architecture, KeySet
from zerowaste_vae.engine.network.ops.conv import Conv
from zerowaste_vae.engine.network.ops.down import StridedDown
from zerowaste_vae.engine.network.ops.ends import Moments, Patches, Pixels
from zerowaste_vae.engine.network.ops.norm import Length
from zerowaste_vae.engine.network.ops.up import ShuffleUp
from zerowaste_vae.engine.network.program import STEP, TILES, Program
from zerowaste_vae.engine.vae import VideoVAE

#: Frames by which all that stays is there, of long clips; half as many are looked at before each end.
SETTLED = 200


class Config:
    decoder_widths = encoder_widths = (4,)
    latent_channels = 4
    norm_groups = None


TRIVIAL = Architecture(
    KeySet("trivial", (("decoder.enter.weight",),)), 16, 2, 1.0, lambda shapes, groups: Config(),
    lambda config: Program.of(
        "encoder", 3, Patches("patches", 16, 8), Conv("enter", 192, 4), STEP, StridedDown("shrink", 4, True), TILES,
        Moments("norm", "leave", 4, 8, Length()),
    ),
    lambda config: Program.of(
        "decoder", 4, Conv("enter", 4, 4), TILES, ShuffleUp("grow", 4, True), STEP,
        Pixels("norm", "leave", 4, Length(), patch=8),
    ),
)  # fmt: skip


class Watch:
    """Bytes of the frames that are alive, and of the process, as they pass by."""

    def __init__(self, count: int) -> None:
        self._settled = min(SETTLED, count // 2)
        self.frames = self.alive = self.most = 0
        self._resident: list[tuple[int, int]] = []

    def see(self, frames: torch.Tensor, count: int) -> torch.Tensor:
        self.alive += frames.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(frames, self._gone, frames.nbytes)
        self.frames += count
        self._resident.append((self.frames, resident_bytes()))
        return frames

    @property
    def settled(self) -> int:
        return self._most(self._settled)

    @property
    def last(self) -> int:
        return self._most(self.frames)

    def _most(self, end: int) -> int:
        """Return the most of the frames before: single samples differ by what a convolution just holds."""
        return max(size for frame, size in self._resident if end - self._settled // 2 < frame <= end)

    def _gone(self, size: int) -> None:
        self.alive -= size


def main(kind: str, count: int, folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if kind == "trivial":
        model = TRIVIAL.build(Config()).requires_grad_(False)
        vae = VideoVAE(model, TRIVIAL, "fp32", torch.float32, torch.device("cpu"))
        size = 30, 54
    else:
        vae, size = load(demo_vae_path(), device="cpu"), (8, 8)
    latents = (count - 1) // vae.temporal + 1
    frames = vae.temporal * (latents - 1) + 1
    with LatentWriter(folder / "l.safetensors") as writer:
        for _ in range(latents):
            writer.write(torch.randn(1, vae.latent_channels, 1, *size))
        writer.finish()
    loaded, watch = resident_bytes(), Watch(frames)
    with Mp4Writer(folder / "clip.mp4", Format(24, crf=40)) as file:
        for piece in vae.stream(LatentFile(folder / "l.safetensors", vae.latent_channels), output="uint8", chunk=4):
            file.write(watch.see(piece, piece.shape[1])[0])
    file.finish()
    decode = {"frames": watch.frames, "alive": watch.most, "settled": watch.settled, "last": watch.last}
    each, watch = piece[0, 0].nbytes, Watch(frames)
    made = 0
    with LatentWriter(folder / "again.safetensors") as writer:
        for latent in vae.encode_stream((watch.see(f, 1) for f in Clip(folder / "clip.mp4")), chunk=4):
            made += latent.shape[2]
            writer.write(latent)
        writer.finish()
    encode = {"frames": watch.frames, "alive": watch.most, "settled": watch.settled, "last": watch.last}
    reach = float(vae.model.encoder.program.reach[0])
    print(json.dumps({"loaded": loaded, "frame": each, "temporal": vae.temporal, "expected": frames, "latents": latents,
                      "made": made, "reach": reach, "decode": decode, "encode": encode}))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
