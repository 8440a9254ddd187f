"""Zero-Waste VAE Compare: one latent through this pack and through the host's own decode."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from comfy_api.latest import ui
from torch import Tensor

from ..engine import InputError
from ..engine.bench.metrics import Comparison, tile_edges
from ..engine.bench.metrics import compare as compare_clips
from ..engine.request import usual_overlap
from . import frames, host
from .conversion import engine_vae, host_decode
from .host import io
from .reports import KEY, Outcome
from .settings import DEFAULT_OVERLAP, Settings, from_widgets
from .widgets import chunk_input, output_input, ram_input, report_output, schema, tiling_inputs, vae_input, vram_input

#: The most frames that the figures are taken from; SSIM and seams of more would take longer than the decodes.
MOST_FRAMES = 17
#: From here on frames differ by a thousandth of one of 255 steps at most, as by sums of fp32 in another order.
ROUNDING_DB = 110.0


class Compare(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAECompare",
            "Zero-Waste VAE Compare",
            ["compare vae", "vae benchmark", "vae quality", "vae speed"],
            description="Decodes a latent twice, with this pack and with ComfyUI's own VAE Decode, and says how long "
            "each took, how much memory, and how far the frames differ.",
            inputs=[
                io.Latent.Input("samples", display_name="Latent", tooltip="What is decoded, by both."),
                vae_input("From any loader; it must be one this pack runs."),
                vram_input(),
                chunk_input(),
                *tiling_inputs(),
                output_input(),
                ram_input("Host memory our decode may take for what it parks there, in GB (2^30 bytes). 0: automatic."),
            ],
            outputs=[
                io.Image.Output(display_name="Zero-Waste", tooltip="Frames of this pack's decode."),
                io.Image.Output(display_name="ComfyUI", tooltip="Frames of ComfyUI's own."),
                report_output(),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, samples: dict, vae: object, **widgets: object) -> io.NodeOutput:
        wishes, fast, latent = from_widgets(**widgets), engine_vae(vae), samples["samples"]
        if fast is None:
            raise InputError("ComfyUI's own code decodes this VAE in both cases: there is nothing to compare")
        theirs, their_outcome = host_decode(host.own_vae(vae), _as_host(latent, fast), Settings())
        their_outcome.report.mode = "VAE Decode"
        wishes = wishes.over(fast.settings)
        clip, our_outcome = fast.run_decode(latent, wishes)
        crop = samples.get(frames.CLIP_SIZE), fast.engine.architecture.filled, fast.layout.multiple
        cropped = frames.crop_clip(clip, *crop)
        theirs = theirs.unflatten(0, clip.shape[:2]) if theirs.shape[1:] == clip.shape[2:] else theirs[None]
        theirs = frames.crop_clip(theirs, *crop)
        pair = cropped.flatten(0, 1), theirs.flatten(0, 1)
        found = compare_clips(*(images[:MOST_FRAMES].float() for images in pair), *_edges(our_outcome, wishes, pair[0]))
        sides = {"ours": _side(our_outcome), "theirs": _side(their_outcome)}
        lines = list(_lines(found))
        text = "\n".join([*_heads(sides), *lines])
        facts = {**sides, "lines": lines, "comparison": found.record(), "text": text}
        middle = len(pair[0]) // 2
        shown = preview([images[middle : middle + 1] for images in pair], cls)
        return io.NodeOutput(*pair, text, ui={"text": (text,), KEY: (facts,), **shown})


def _as_host(latent: Tensor, vae: host.EngineVAE) -> Tensor:
    """Return the latent in the form that the host's own decode takes: with an axis for time where there is one."""
    latent = vae.layout.latent(latent)
    return latent[:, :, 0] if vae.layout.flat else latent


def _edges(outcome: Outcome, wishes: Settings, images: Tensor) -> tuple[list[int], list[int]]:
    """Return the rows and columns at which our blended tiles begin or end; none for whole frames."""
    facts = outcome.plan
    if not facts or facts["mode"] != "blended":
        return [], []
    scale = facts["spatial"]
    usual = wishes.overlap in (None, DEFAULT_OVERLAP)
    overlap = usual_overlap(facts["tile_width"]) if usual else wishes.overlap
    rows, columns = tile_edges(facts["height"], facts["width"], facts["tile_width"], overlap, scale)
    return [r for r in rows if r < images.shape[1]], [c for c in columns if c < images.shape[2]]


def _side(outcome: Outcome) -> dict[str, object]:
    report = outcome.report
    batch, count = report.clip[:2]
    return {
        "seconds": report.total_seconds,
        "ms": 1e3 * report.total_seconds / max(batch * count, 1),
        "gb": report.reserved_gb,
        "mode": report.mode,
        "precision": report.precision,
    }


def _heads(sides: dict[str, dict]) -> list[str]:
    names = {"ours": "Zero-Waste", "theirs": "ComfyUI"}
    return [
        f"{names[name]}: {side['ms']:.1f} ms per frame{_memory(side)}; {side['mode']}, {side['precision']}"
        for name, side in sides.items()
    ]


def _lines(found: Comparison) -> Iterator[str]:
    if found.max_error == 0:
        yield f"The frames: equal ({found.frames} compared)"
    elif found.psnr >= ROUNDING_DB:
        yield f"The frames: equal but for rounding ({found.frames} compared)"
    else:
        yield (
            f"The frames: {found.psnr:.1f} dB PSNR, largest error {255 * found.max_error:.1f} of 255 "
            f"({found.frames} compared)"
        )
    seams = [s for s in (found.seam_rows, found.seam_columns) if s is not None]
    worst = max((s.ratio for s in seams), default=None)
    yield (
        "Seams: none possible, the frames are whole" if worst is None else f"Seams: {worst:.1f} times an ordinary step"
    )
    yield from (f"Found: {finding}" for finding in found.findings)


def _memory(side: dict) -> str:
    return f", {side['gb']:.1f} GB" if side["gb"] else ""


def preview(images: list[Tensor], node: type[io.ComfyNode]) -> dict[str, object]:
    """Return the ui entries of frames [1, H, W, 3] of one size, written to the host's temporary folder."""
    return ui.PreviewImage(torch.cat([image.float().cpu() for image in images]), cls=node).as_dict()
