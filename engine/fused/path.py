"""Whether the fused operators can run a model here, and if so, their weights, plans and runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..kernels.conv3d import padded_channels
from ..kernels.targets import target

if TYPE_CHECKING:
    from .decoder import FusedDecoder
    from .encoder import FusedEncoder

#: Partial sums, coefficients and the output convolution's scratch, which operators allocate themselves.
TEMPORARY_BYTES = 192 << 20
#: Full-size pixels per step that fill a GPU. At 1280x720, one frame per step is as fast as eight (H200).
STEP_PIXELS = 1 << 20


def why_off(architecture: str, config: object, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason the fused operators cannot run this model on this device, or None."""
    if architecture != "seedvr2":
        return f"no fused network for {architecture}"
    here = target(device)
    if not here.kernels:
        return here.notes[0] if here.notes else f"no kernels for {device}"
    if not here.supports(dtype):
        return f"no fused kernels for {dtype}: plain torch keeps its precision"
    widths = {*(getattr(config, "encoder_widths", None) or ()), *(getattr(config, "decoder_widths", None) or ())}
    odd = sorted(w for w in widths if padded_channels(w, dtype) != w)
    if odd:
        return f"widths {odd} are no multiples of {padded_channels(1, dtype)}"
    return None


class FusedPath:
    """The fused halves of one model: packed when first used, dropped by `release`."""

    def __init__(self, model: nn.Module, build: Callable[[], nn.Module], dtype: torch.dtype) -> None:
        """`build` makes the model on the meta device, for plans."""
        self._model = model
        self._build = build
        self._dtype = dtype
        self._packed: dict[str, FusedDecoder | FusedEncoder] = {}
        self._peak = functools.lru_cache(maxsize=256)(self._dry_run)

    def decoder(self) -> FusedDecoder:
        return self._get("decoder")  # type: ignore[return-value]

    def encoder(self) -> FusedEncoder:
        return self._get("encoder")  # type: ignore[return-value]

    def release(self) -> None:
        """Give the packed weights back; the next use packs anew (0.15 s for the published decoder on an H200)."""
        self._packed.clear()

    def packed_bytes(self, half: str) -> int:
        """Bytes of the packed weights now held for "encoder" or "decoder"; `peak` counts them too."""
        return self._packed[half].nbytes if half in self._packed else 0

    def frames_per_step(self, height: int, width: int) -> int:
        """Frames at full size that make one well-filled step, for a frame of this many pixels."""
        return max(1, STEP_PIXELS // (height * width))

    def peak(self, half: str, latents: int, frames: int, height: int, width: int, output: torch.dtype) -> int:
        """Bytes a run takes besides the plain weights. height, width in pixels; latents and frames per step."""
        return self._peak(half, latents, frames, height, width, output)

    def _get(self, half: str) -> FusedDecoder | FusedEncoder:
        if half not in self._packed:
            self._packed[half] = _pack(getattr(self._model, half), half, self._dtype)
        return self._packed[half]

    @functools.cached_property
    def _meta(self) -> dict[str, FusedDecoder | FusedEncoder]:
        with torch.device("meta"), torch.no_grad():
            model = self._build()
            halves = [h for h in ("encoder", "decoder") if getattr(model, h) is not None]
            return {h: _pack(getattr(model, h), h, self._dtype) for h in halves}

    def _dry_run(self, half: str, latents: int, frames: int, height: int, width: int, output: torch.dtype) -> int:
        network, meta = self._meta[half], torch.device("meta")
        if half == "decoder":
            run = network.plan(latents, height // 8, width // 8, frames, output, meta)  # type: ignore[union-attr]
            transit = 0
        else:
            run = network.plan(latents, height, width, frames, meta)  # type: ignore[union-attr]
            # The chunk's frames in float32 as they arrive and as they go in.
            transit = 2 * 4 * latents * height * width * 3 * 4
        return run.nbytes + network.nbytes + transit + TEMPORARY_BYTES


def _pack(half: nn.Module, name: str, dtype: torch.dtype) -> FusedDecoder | FusedEncoder:
    from .decoder import FusedDecoder
    from .encoder import FusedEncoder

    return (FusedDecoder if name == "decoder" else FusedEncoder)(half, dtype)

