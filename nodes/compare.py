"""Zero-Waste VAE Compare: one latent through this pack and through the host's own decode."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from comfy_api.latest import ui
from torch import Tensor

from ..engine import InputError
from ..engine.extras.bench.metrics import Comparison, tile_edges
from ..engine.extras.bench.metrics import compare as compare_clips
from ..engine.request import usual_overlap
from .conversion import engine_vae, host_decode
from .host import io, own_vae
from .reports import KEY, Outcome
from .settings import DEFAULT_OVERLAP, Settings, from_widgets
from .widgets import report_output, schema, shared, tiling_inputs

#: The most frames that the figures are taken from; SSIM and seams of more would take longer than the decodes.
MOST_FRAMES = 17
#: From here on frames differ by a thousandth of one of 255 steps at most, as by sums of fp32 in another order.
ROUNDING_DB = 110.0


class Compare(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAECompare", "Zero-Waste VAE Compare",
            ["compare vae", "vae benchmark", "vae quality", "vae speed"],
            description="Decodes a latent twice, with this pack and with ComfyUI's own VAE Decode, and says how long "
            "each took, how much memory, and how far the frames differ.",
            inputs=[
                shared("samples", "What is decoded, by both."),
                shared("vae", "From any loader; it must be one this pack runs."),
                shared("vram_gb"), shared("chunk"), *tiling_inputs(), shared("output"),
                shared("ram_gb", "Host memory our decode may take for what it parks there, in GB (2^30 bytes). 0: "
                       "automatic."),
            ],
            outputs=[
                io.Image.Output(display_name="Zero-Waste", tooltip="Frames of this pack's decode."),
                io.Image.Output(display_name="ComfyUI", tooltip="Frames of ComfyUI's own."),
                report_output(),
            ],
            is_output_node=True,
        )  # fmt: skip

    @classmethod
    def execute(cls, samples: dict, vae: object, **given: object) -> io.NodeOutput:
        wishes, fast, latent = from_widgets(**given), engine_vae(vae), samples["samples"]
        if fast is None:
            raise InputError("ComfyUI's own code decodes this VAE in both cases: there is nothing to compare")
        as_host = fast.layout.samples(fast.layout.latent(latent))
        own = own_vae(fast if fast.engine.path else vae)  # a file that the engine had to read anew is theirs too
        theirs, their_outcome = host_decode(own, as_host, Settings())
        their_outcome.report.mode = "VAE Decode"
        wishes = wishes.over(fast.settings)
        clip, our_outcome = fast.run_decode(latent, wishes)
        theirs = theirs.unflatten(0, clip.shape[:2]) if theirs.shape[1:] == clip.shape[2:] else theirs[None]
        pair = [fast.layout.crop(frames, samples).flatten(0, 1) for frames in (clip, theirs)]
        found = compare_clips(*(images[:MOST_FRAMES].float() for images in pair), *_edges(our_outcome, wishes, pair[0]))
        sides = {"ours": _side(our_outcome), "theirs": _side(their_outcome)}
        lines = list(_lines(found))
        text = "\n".join([_head("Zero-Waste", sides["ours"]), _head("ComfyUI", sides["theirs"]), *lines])
        facts = {**sides, "lines": lines, "comparison": found.record(), "text": text}
        middle = len(pair[0]) // 2
        shown = torch.cat([images[middle : middle + 1].float().cpu() for images in pair])
        shown = ui.PreviewImage(shown, cls=cls).as_dict()
        return io.NodeOutput(*pair, text, ui={"text": (text,), KEY: (facts,), **shown})


def _edges(outcome: Outcome, wishes: Settings, images: Tensor) -> tuple[list[int], list[int]]:
    """Return the rows and columns at which our blended tiles begin or end; none for whole frames."""
    facts = outcome.plan
    if not facts or facts["mode"] != "blended":
        return [], []
    usual = wishes.overlap in (None, DEFAULT_OVERLAP)
    overlap = usual_overlap(facts["tile_width"]) if usual else wishes.overlap
    rows, columns = tile_edges(facts["height"], facts["width"], facts["tile_width"], overlap, facts["spatial"])
    return [r for r in rows if r < images.shape[1]], [c for c in columns if c < images.shape[2]]


def _side(outcome: Outcome) -> dict[str, object]:
    report = outcome.report
    batch, count = report.clip[:2]
    return {
        "seconds": report.total_seconds, "ms": 1e3 * report.total_seconds / max(batch * count, 1),
        "gb": report.reserved_gb, "mode": report.mode, "precision": report.precision,
    }  # fmt: skip


def _head(name: str, side: dict) -> str:
    memory = f", {side['gb']:.1f} GB" if side["gb"] else ""
    return f"{name}: {side['ms']:.1f} ms per frame{memory}; {side['mode']}, {side['precision']}"


def _lines(found: Comparison) -> Iterator[str]:
    count = found.frames
    if found.max_error == 0:
        yield f"The frames: equal ({count} compared)"
    elif found.psnr >= ROUNDING_DB:
        yield f"The frames: equal but for rounding ({count} compared)"
    else:
        worst = 255 * found.max_error
        yield f"The frames: {found.psnr:.1f} dB PSNR, largest error {worst:.1f} of 255 ({count} compared)"
    worst = max((s.ratio for s in (found.seam_rows, found.seam_columns) if s is not None), default=None)
    whole = "Seams: none possible, the frames are whole"
    yield whole if worst is None else f"Seams: {worst:.1f} times an ordinary step"
    yield from (f"Found: {finding}" for finding in found.findings)
