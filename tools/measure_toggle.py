"""Measure the effect of one optimisation: the same calls with and without it in turns, with medians, memory and dB.

    python tools/measure_toggle.py winograd --weights seedvr2 --sizes 1280x720 --frames 21 --precisions fp16 fp8

Run it where the pack is importable as zerowaste_vae. Weights are seeded ones of a family's published widths; dB are
those of the clip's first frames against fp32, without the toggle. Each case prints one line.
"""

from __future__ import annotations

import argparse
import functools
import sys
from itertools import product

import torch
from torch import Tensor
from zerowaste_vae import VideoVAE, load
from zerowaste_vae.engine.archs import by_name
from zerowaste_vae.engine.bench.calls import Spread, in_turns
from zerowaste_vae.engine.bench.metrics import psnr
from zerowaste_vae.engine.bench.subject import check_size, copy_of, random_checkpoint, seeded_input
from zerowaste_vae.engine.errors import ZeroWasteError
from zerowaste_vae.engine.report import Report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("toggle", help="its name, as for --on and --off")
    parser.add_argument("--weights", default="seedvr2", metavar="FAMILY")
    parser.add_argument("--sizes", nargs="+", default=["1280x720"], metavar="WxH")
    parser.add_argument("--frames", type=int, default=21, metavar="N")
    parser.add_argument("--precisions", nargs="+", default=["auto"], metavar="P")
    parser.add_argument("--encode", action="store_true", help="encode (default: decode)")
    parser.add_argument("--vram-gb", type=float, metavar="GB")
    parser.add_argument("--runs", type=int, default=5, help="timed calls of each, after a first one")
    parser.add_argument("--db-frames", type=int, default=5, metavar="N", help="frames compared with fp32 (0: none)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args(argv)

    weights = random_checkpoint(architecture=by_name(asked.weights))
    for precision, size in product(asked.precisions, asked.sizes):
        vae = load(copy_of(weights), device=asked.device, precision=precision)
        forms = {on: vae.with_options(vae.options.switched(**{on: [asked.toggle]})) for on in ("off", "on")}
        half, shape = "encoder" if asked.encode else "decoder", check_size(size, vae.spatial)
        x = seeded_input(vae, half, asked.frames, *shape)
        calls = {on: functools.partial(call, form, x, asked) for on, form in forms.items()}
        seconds, _ = in_turns(calls, asked.runs, vae.device)
        each = {on: Spread.of(times[1:], 1e3 / asked.frames) for on, times in seconds.items()}
        said = {on: f"{on} {t}, {memory(forms[on].last_report)}" for on, t in each.items()}
        if asked.db_frames:
            x = seeded_input(vae, half, asked.db_frames, *shape)
            made = {on: call(form, x, asked) for on, form in forms.items()}
            exact = call(load(copy_of(weights), device=asked.device, precision="fp32"), x, asked)
            for on in forms:
                said[on] += f", {decibel(made[on], exact, asked.encode):.1f} dB"
        what = "encode" if asked.encode else "decode"
        print(f"{asked.weights} {what} {precision} {size} x {asked.frames}, ms a frame, {asked.toggle} {said['off']}; "
              f"{said['on']}: {each['on'].median / each['off'].median:.3f} of the time", flush=True)
        for one in (vae, *forms.values()):
            one.release()
    return 0


def call(vae: VideoVAE, x: Tensor, asked: argparse.Namespace) -> Tensor:
    return (vae.encode if asked.encode else vae.decode)(x, vram_gb=asked.vram_gb)


def memory(report: Report) -> str:
    taken = "memory not measured" if report.reserved_gb is None else f"{report.reserved_gb:.2f} GB"
    return taken if report.predicted_gb is None else f"{taken} ({report.predicted_gb:.2f} stated)"


def decibel(a: Tensor, exact: Tensor, latents: bool) -> float:
    """Return the PSNR in dB, for values in 0..1 with peak 1; for latents relative to their standard deviation."""
    error = (a.double() - exact.double()).square().mean().item()
    return psnr(error, exact.double().std().item() if latents else 1.0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ZeroWasteError as error:
        sys.exit(f"error: {error}")
