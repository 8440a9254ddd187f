"""Measure the stand-ins of zerowaste_vae.adapters beside the VAEs of other programs, on the same random weights of
published sizes, each through the other program's own calls.

    python tools/measure_packs.py diffusers OUT.json --cases wan qwen flux
    SEEDVR2_PACK=CHECKOUT python tools/measure_packs.py seedvr2 OUT.json
    WANVIDEO_PACK=CHECKOUT python tools/measure_packs.py wanvideo OUT.json --frames 33 81

Run it where the pack is importable as zerowaste_vae, and what the other program imports is installed. The checkouts
are those of ComfyUI-SeedVR2_VideoUpscaler and ComfyUI-WanVideoWrapper; ComfyUI itself is not needed. Each way to run
prints a line once it is done: median and range in ms a frame, the largest memory that torch has reserved, beside it
what the plan stated, and for ours the dB against the other program's whole frames (peak: 2, of -1..1; 16-bit types
round them). What must hold follows. `--ours` runs ours alone, once, which fills the cache of compiled kernels;
`--small` takes narrow networks, for a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from other_packs import Upscaler, wanvideo_vae
from torch import Tensor, nn
from zerowaste_vae import load
from zerowaste_vae.adapters import SeedVR2VAE, WanVideoVAE, for_diffusers
from zerowaste_vae.engine.errors import ZeroWasteError
from zerowaste_vae.engine.extras.bench.calls import GIB, Spread, settle, time_calls
from zerowaste_vae.engine.extras.bench.environment import environment
from zerowaste_vae.engine.extras.bench.metrics import psnr
from zerowaste_vae.engine.extras.bench.subject import check_size, noise_latent, noise_video
from zerowaste_vae.engine.planning.plan import Plan

#: Sizes of Flux's AutoencoderKL; the other classes have theirs as defaults.
FLUX = {
    "block_out_channels": (128, 256, 512, 512), "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "layers_per_block": 2, "latent_channels": 16,
    "use_quant_conv": False, "use_post_quant_conv": False, "shift_factor": 0.1159, "scaling_factor": 0.3611,
}  # fmt: skip
#: Case -> class of diffusers, its sizes, those of --small, width and height, frames (0: pictures have no such axis),
#: and the most ms a frame that ours may take.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, int, float | None]] = {
    "wan": ("AutoencoderKLWan", {}, {"base_dim": 32}, "1280x720", 33, 18.0),
    "flux": ("AutoencoderKL", FLUX, {"block_out_channels": (32,) * 4}, "1024x1024", 0, None),
    "qwen": ("AutoencoderKLQwenImage", {}, {"base_dim": 32}, "1024x1024", 1, None),
}
#: Ours must be so many times faster than diffusers' own.
TIMES = 2.0
#: GB above what was stated that torch may reserve: its blocks are of 2 MB and more, and the result may lie there.
SLACK = 0.1
#: WanVideoWrapper's tiles and their strides, in pixels, as its nodes have them.
TILE, STRIDE = (272, 272), (144, 128)


def main(argv: list[str] | None = None) -> int:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("out", type=Path, help="JSON of all figures")
    common.add_argument("--runs", type=int, default=4, help="timed calls of each, after a first one (default: 4)")
    common.add_argument("--size", metavar="WxH", help="pixels (default: the case's)")
    common.add_argument("--frames", nargs="+", type=int, metavar="N", help="of a clip (default: the case's)")
    common.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    common.add_argument("--vram-gb", type=float, metavar="GB", help="memory that ours may take")
    common.add_argument("--ours", action="store_true", help="run ours alone, once")
    common.add_argument("--small", action="store_true", help="narrow networks")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    one = commands.add_parser("diffusers", parents=[common], help="decodes of diffusers' VAEs in bf16")
    one.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    one.set_defaults(measure=beside_diffusers)
    one = commands.add_parser("wanvideo", parents=[common], help="decodes as WanVideoWrapper's node does them, in bf16")
    one.set_defaults(measure=beside_wanvideo)
    one = commands.add_parser("seedvr2", parents=[common], help="both phases of the SeedVR2 upscaler's VAE")
    one.add_argument("--batch", type=int, default=5, help="frames of a batch (default: 5)")
    one.add_argument("--overlap", type=int, default=0, help="frames that two batches share (default: 0)")
    one.add_argument("--tile", nargs=2, type=int, default=(1024, 128), metavar=("SIZE", "OVERLAP"),
                     help="the upscaler's own tiles in pixels (default: 1024 128)")  # fmt: skip
    one.set_defaults(measure=beside_upscaler, vram_gb=8.0)
    asked = parser.parse_args(argv)
    return Measurement(asked).run()


class Measurement:
    """Lines and figures of one call of this tool."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.device = asked, torch.device(asked.device)
        self.found: dict[str, Any] = {"environment": environment(self.device), "cases": {}}
        self.holds = True

    def run(self) -> int:
        """Measure; return 1 where something that must hold does not."""
        self.asked.measure(self)
        return int(not self.holds)

    def timed(
        self, case: str, who: str, frames: int, call: Callable[[], Tensor], stated: Callable[[], float] | None = None,
    ) -> tuple[dict[str, Any], Tensor]:  # fmt: skip
        """Time a call, which is one of ours if its plan's GB are `stated` afterwards. Returns figures and result."""
        figures, result = time_calls(call, 1 if self.asked.ours else self.asked.runs, self.device)
        figures |= {"ms": 1e3 * figures["median_s"] / frames, "stated_gb": stated() if stated else None}
        each = Spread(*(1e3 * figures[name] / frames for name in ("median_s", "low_s", "high_s")), figures["runs"])
        self.tell(case, who, f"{each} ms a frame, first call {figures['first_s']:.1f} s, {memory(figures)}", figures)
        return figures, result

    def tell(self, case: str, who: str, line: str, figures: dict[str, Any]) -> None:
        """Print a line of figures, and keep them."""
        self.found["cases"].setdefault(case, {})[who] = {k: v for k, v in figures.items() if k != "trace"}
        self.asked.out.write_text(json.dumps(self.found, indent=1))
        print(f"{case}, {who}: {line}", flush=True)

    def must(self, what: str, holds: bool) -> None:
        """Print whether something holds that must; on a CPU or with --ours nothing must."""
        if self.device.type == "cuda" and not self.asked.ours and not self.asked.small:
            self.holds &= holds
            print(f"  {'holds' if holds else 'FAILS'}: {what}", flush=True)

    def keeps(self, figures: dict[str, Any]) -> None:
        """Tell whether memory keeps to what was stated, beside what the device held before."""
        if figures["reserved_gb"] is not None:
            most = figures["stated_gb"] + figures["held_gb"] + SLACK
            self.must(f"{figures['reserved_gb']:.2f} GB reserved of at most {most:.2f}", figures["reserved_gb"] <= most)

    def drops(self, vae: nn.Module) -> None:
        """Free what a VAE has on the device."""
        vae.to("cpu")
        settle(self.device)


def memory(figures: dict[str, Any]) -> str:
    """Return the words for the memory of a way to run."""
    reserved, stated = figures["reserved_gb"], figures["stated_gb"]
    taken = "memory not measured" if reserved is None else f"{reserved:.2f} GB reserved"
    return taken if stated is None else f"{taken} ({stated:.2f} stated)"


def decibel(ours: Tensor, theirs: Tensor) -> float:
    """Return the PSNR of frames in -1..1 in dB. Clips of theirs may be shorter."""
    error = ours[: len(theirs)].to("cpu", torch.float32) - theirs.to("cpu", torch.float32)
    return psnr(error.square().mean(dtype=torch.float64).item(), 2.0)


# -- diffusers ---------------------------------------------------------------------------------------------------------


def beside_diffusers(m: Measurement) -> None:
    import diffusers

    m.found["diffusers"] = diffusers.__version__
    for case in m.asked.cases:
        kind, sizes, small, _, frames, _ = CASES[case]
        theirs = getattr(diffusers, kind)(**sizes | (small if m.asked.small else {})).eval().requires_grad_(False)
        drawn(theirs)
        theirs.to(m.device, torch.bfloat16 if m.device.type == "cuda" else torch.float32)
        for count in (m.asked.frames or [frames]) if frames else [0]:
            one_of_diffusers(m, case, theirs, count)
        m.drops(theirs)


def one_of_diffusers(m: Measurement, case: str, theirs: nn.Module, frames: int) -> None:
    """Measure a VAE of diffusers, which is on the device, and ours in its place."""
    kind, _, _, size, _, most = CASES[case]
    width, height = check_size(m.asked.size or size, 8)
    count = max(frames, 1)
    z = noise_latent(16, (count + 3) // 4, height // 8, width // 8).to(m.device, theirs.dtype)
    z = z if frames else z[:, :, 0]
    name = f"{kind} {width}x{height} x {count}"
    if not m.asked.ours:
        before, expected = m.timed(name, "diffusers", count, lambda: decoded(theirs, z))
        expected = expected.cpu()
    ours = for_diffusers(theirs, vram_gb=m.asked.vram_gb)
    m.drops(theirs)
    after, made = m.timed(name, "ours", count, lambda: decoded(ours, z), lambda: ours.vae.last_report.predicted_gb)
    if not m.asked.ours:
        db, times = decibel(made, expected), before["ms"] / after["ms"]
        m.tell(name, "both", f"{db:.1f} dB between them", {"db": db, "times": times})
        m.must(f"{times:.2f} times as fast, of at least {TIMES}", times >= TIMES)
        if most is not None:
            m.must(f"{after['ms']:.1f} ms a frame, of at most {most}", after["ms"] <= most)
        m.keeps(after)
    m.drops(ours)
    theirs.to(m.device)


def drawn(module: nn.Module) -> None:
    """Draw the weights of matrices and convolutions so that what runs through them keeps its deviation."""
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in module.parameters():
            if tensor.ndim > 1 and tensor[0].numel() > 1:
                tensor.normal_(0, tensor[0].numel() ** -0.5)


def decoded(vae: Any, z: Tensor) -> Tensor:
    """Decode as a pipeline does."""
    with torch.no_grad():
        return vae.decode(z, return_dict=False)[0]


# -- WanVideoWrapper ---------------------------------------------------------------------------------------------------


def beside_wanvideo(m: Measurement) -> None:
    dtype = torch.bfloat16 if m.device.type == "cuda" else torch.float32
    theirs = wanvideo_vae("wan2.1", m.asked.small, dtype)
    ours = WanVideoVAE(load(theirs.model.state_dict(), device=m.device), theirs, vram_gb=m.asked.vram_gb)
    width, height = check_size(m.asked.size or "1280x720", 8)
    for count in m.asked.frames or [33]:
        z = noise_latent(16, (count + 3) // 4, height // 8, width // 8)
        name, rows = f"WANVAE {width}x{height} x {count}", {}
        rows["ours"] = m.timed(name, "ours", count, lambda z=z: as_its_node(ours, z, m.device, False),
                               lambda: ours.vae.last_report.predicted_gb)  # fmt: skip
        if m.asked.ours:
            continue
        for who, tiled in (("theirs, whole", False), ("theirs, tiled", True)):
            rows[who] = m.timed(name, who, count, lambda z=z, tiled=tiled: as_its_node(theirs, z, m.device, tiled))
        db = {who: decibel(rows[who][1] * 2, rows["theirs, whole"][1] * 2) for who in ("ours", "theirs, tiled")}
        times = {who: figures["ms"] / rows["ours"][0]["ms"] for who, (figures, _) in rows.items() if who != "ours"}
        m.tell(name, "both", "dB against its whole frames: " + ", ".join(f"{who} {n:.1f}" for who, n in db.items())
               + "; ours is faster " + ", ".join(f"than {who} {n:.2f} times" for who, n in times.items()),
               {"db": db, "times": times})  # fmt: skip
        m.keeps(rows["ours"][0])


def as_its_node(vae: Any, z: Tensor, device: torch.device, tiled: bool) -> Tensor:
    """Decode as WanVideoDecode does: move the VAE, decode, to 0..1 in host memory, move it away."""
    vae.to(device)
    tile, stride = (tuple(n // 8 for n in sides) for sides in (TILE, STRIDE))
    with torch.no_grad():
        made = vae.decode(z.to(device, vae.dtype), device=device, end_=False, tiled=tiled, tile_size=tile,
                          tile_stride=stride)[0]  # fmt: skip
    frames = made.cpu().float().clamp_(-1.0, 1.0).add_(1.0).div_(2.0)
    vae.to("cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return frames.permute(1, 2, 3, 0)


# -- the SeedVR2 upscaler ----------------------------------------------------------------------------------------------


def beside_upscaler(m: Measurement) -> None:
    pack, asked, plans = Upscaler(m.device, m.asked.small), m.asked, []
    made = load(pack.weights, device=m.device)
    ours = SeedVR2VAE(made, dtype=pack.dtype, vram_gb=asked.vram_gb, on_plan=plans.append)
    width, height = check_size(asked.size or "1920x1080", 8)
    for count in asked.frames or [45]:
        clip = noise_video(min(count, asked.batch), height, width).repeat(-(-count // asked.batch), 1, 1, 1)[:count]
        name, videos = f"SeedVR2 upscaler {width}x{height} x {count}, batches of {asked.batch}", {}
        # Whole frames of its own are run for one batch: they are there to compare ours with.
        ways = {"ours": (ours, None, clip), "theirs, tiled": (pack.own, tuple(asked.tile), clip),
                "theirs, whole": (pack.own, None, clip[: asked.batch])}  # fmt: skip
        for who, (vae, tile, frames) in ways.items():
            if asked.ours and who != "ours":
                continue
            pack.run(vae, frames[: asked.batch], asked.batch, asked.overlap, tile)  # compiles, and warms libraries
            m.drops(vae)
            plans.clear()
            video, figures = phases(m, pack, vae, frames, tile)
            figures["stated_gb"] = max(plan.peak_bytes for plan in plans) / GIB if plans else None
            words = "; ".join(
                f"{what} {figures[f'{what}_s']:.2f} s, {Spread.of(figures[f'{what}_batches_s'], 1e3 / asked.batch)} "
                "ms a frame by batch" for what in ("encode", "decode")
            )  # fmt: skip
            m.tell(name, who, f"{words}; {len(frames)} frames, {memory(figures)}", figures)
            videos[who] = video.cpu()
            if who == "ours":
                checked(m, figures, plans)
        if not asked.ours:
            db = {who: decibel(videos[who], videos["theirs, whole"]) for who in ("ours", "theirs, tiled")}
            said = ", ".join(f"{who} {n:.1f}" for who, n in db.items())
            m.tell(name, "both", f"dB of the first batch against its whole frames, encoded and decoded: {said}", db)


def phases(
    m: Measurement, pack: Upscaler, vae: nn.Module, clip: Tensor, tile: tuple[int, int] | None
) -> tuple[Tensor, dict[str, Any]]:
    """Run both phases; return frames and figures. The first batch of a phase brings the weights."""
    settle(m.device)
    on_gpu = m.device.type == "cuda"
    # The upscaler's own tensors: a batch's pixels before and after their transforms, and the result in two layouts.
    pixels = 4 * m.asked.batch * clip[0].numel() * pack.dtype.itemsize
    held = (torch.cuda.memory_reserved(m.device) + pixels) / GIB if on_gpu else None
    video, encode, decode = pack.run(vae, clip, m.asked.batch, m.asked.overlap, tile)
    figures = {
        "encode_s": encode.seconds, "encode_batches_s": encode.batches, "decode_s": decode.seconds,
        "decode_batches_s": decode.batches, "frames": len(clip), "held_gb": held,
        "reserved_gb": torch.cuda.max_memory_reserved(m.device) / GIB if on_gpu else None,
    }  # fmt: skip
    return video, figures


def checked(m: Measurement, figures: dict[str, Any], plans: list[Plan]) -> None:
    """Tell whether ours ran whole frames within the limit."""
    tiles = max(len(plan.grid) for plan in plans)
    m.must(f"whole frames in all of {len(plans)} batches" if tiles == 1 else f"{tiles} tiles a frame", tiles == 1)
    if figures["reserved_gb"] is not None:
        held, limit = figures["held_gb"], m.asked.vram_gb
        m.must(f"{figures['reserved_gb']:.2f} GB reserved under a limit of {limit:g} beside {held:.2f} of the "
               "upscaler's own", figures["reserved_gb"] <= limit + held)  # fmt: skip
        m.keeps(figures)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ZeroWasteError as error:
        sys.exit(f"error: {error}")
