"""Measure what the documents state of this machine: the same calls in turns, with medians, memory, dB or equal bits.

    python tools/measure.py toggle winograd --sizes 1280x720 --precisions fp16 fp8
    python tools/measure.py devices --frames 81 161 597
    torchrun --standalone --nproc-per-node 2 tools/measure.py devices --frames 161
    python tools/measure.py stream --frames 3001 --decode 241 --mp4 clip.mp4
    python tools/measure.py changes --weights flux --runs 50
    python tools/measure.py decoders --weights minimaxh3 --sizes 1344x768 --frames 90 --precisions int8

Run it where the pack is importable as zerowaste_vae. Weights are seeded ones of a family's published widths, frames go
to host memory. Each case prints a line once it is done.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from zerowaste_vae import VideoVAE, load
from zerowaste_vae.engine.checkpoints import Checkpoint
from zerowaste_vae.engine.errors import ZeroWasteError
from zerowaste_vae.engine.extras.bench.calls import Spread, in_turns, resident_bytes, time_calls
from zerowaste_vae.engine.extras.bench.metrics import psnr
from zerowaste_vae.engine.extras.bench.subject import check_size, copy_of, noise_latent, random_checkpoint, seeded_input
from zerowaste_vae.engine.extras.distributed.ranks import Ranks, joined, under_torchrun
from zerowaste_vae.engine.extras.distributed.shares import duration, leads_of, split
from zerowaste_vae.engine.extras.media.mp4 import Format, Mp4Writer
from zerowaste_vae.engine.families import by_name
from zerowaste_vae.engine.network.stamp import HALVES, Stamp
from zerowaste_vae.engine.report import Report


def main(argv: list[str] | None = None) -> int:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--weights", default="seedvr2", metavar="FAMILY")
    common.add_argument("--sizes", nargs="+", default=["1280x720"], metavar="WxH")
    common.add_argument("--precisions", nargs="+", default=["auto"], metavar="P")
    common.add_argument("--runs", type=int, default=5, help="timed calls of each, after a first one")
    common.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    commands = parser.add_subparsers(metavar="WHAT", required=True)

    one = commands.add_parser("toggle", parents=[common], help="one optimisation off and on; dB of the first frames")
    one.add_argument("toggle", help="its name, as for --on and --off")
    one.add_argument("--encode", action="store_true", help="encode (default: decode)")
    one.add_argument("--vram-gb", type=float, metavar="GB")
    one.add_argument("--db-frames", type=int, default=5, metavar="N", help="frames compared with fp32 (0: none)")
    one.set_defaults(run=toggle, frames=21)
    one = commands.add_parser("devices", parents=[common], help="several GPUs and one, beside the computed gain")
    one.add_argument("--counts", nargs="+", type=int, metavar="N", help="GPUs of one process (default: 2, 4, 8)")
    one.set_defaults(run=devices, encode=False, frames=161)
    one = commands.add_parser("stream", parents=[common], help="a long clip as a stream, and `decode` of a shorter one")
    one.add_argument("--decode", type=int, default=241, metavar="N", help="frames of the decode (default: 241)")
    one.add_argument("--mp4", type=Path, metavar="FILE", help="write the stream to this file (default: nowhere)")
    one.set_defaults(run=stream, encode=False, frames=3001)
    one = commands.add_parser("changes", parents=[common], help="the look for changed weights that begins every call")
    one.set_defaults(run=changes, encode=False, frames=1)
    one = commands.add_parser("decoders", parents=[common], help="a family's published decoders of all sizes")
    one.set_defaults(run=decoders, encode=False, frames=90)
    for each in commands.choices.values():
        each.add_argument("--frames", nargs="+", type=int, default=[each.get_default("frames")], metavar="N")
    asked = parser.parse_args(argv)
    return asked.run(asked)


def cases(
    asked: argparse.Namespace, weights: Checkpoint, device: str | torch.device
) -> Iterator[tuple[VideoVAE, tuple[int, int], int, str]]:
    """Yield a loaded VAE, width and height, frames and a name for each precision, size and length that is asked for."""
    for precision in asked.precisions:
        vae = load(copy_of(weights), device=device, precision=precision)
        for size, frames in product(asked.sizes, asked.frames):
            name = f"{asked.weights} {'encode' if asked.encode else 'decode'} {precision} {size} x {frames}"
            yield vae, check_size(size, vae.spatial), frames, name
        vae.release()


# -- toggle ------------------------------------------------------------------------------------------------------------


def toggle(asked: argparse.Namespace) -> int:
    """Compare calls with and without one optimisation."""
    weights, half = random_checkpoint(architecture=by_name(asked.weights)), "encoder" if asked.encode else "decoder"
    for vae, size, frames, name in cases(asked, weights, asked.device):
        forms = {on: vae.with_options(vae.options.switched(**{on: [asked.toggle]})) for on in ("off", "on")}
        x = seeded_input(vae, half, frames, *size)
        seconds, _ = in_turns({on: partial(call, form, x, asked) for on, form in forms.items()}, asked.runs, vae.device)
        each = {on: Spread.of(times[1:], 1e3 / frames) for on, times in seconds.items()}
        said = {on: f"{on} {t}, {memory(forms[on].last_report)}" for on, t in each.items()}
        if asked.db_frames:
            x = seeded_input(vae, half, asked.db_frames, *size)
            exact = call(load(copy_of(weights), device=asked.device, precision="fp32"), x, asked)
            for on, form in forms.items():
                said[on] += f", {decibel(call(form, x, asked), exact, asked.encode):.1f} dB"
        print(f"{name}, ms a frame, {asked.toggle} {said['off']}; {said['on']}: "
              f"{each['on'].median / each['off'].median:.3f} of the time", flush=True)  # fmt: skip
        for form in forms.values():
            form.release()
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


# -- devices -----------------------------------------------------------------------------------------------------------


def devices(asked: argparse.Namespace) -> int:
    """Compare one device with several that share a clip by segments: 2, 4, 8, ... in this process, one count after the
    other, or all ranks under torchrun. Returns 1 where bits differ."""
    weights = random_checkpoint(architecture=by_name(asked.weights))
    gpus = 0 if asked.device == "cpu" else torch.cuda.device_count()
    with joined() if under_torchrun() else contextlib.nullcontext() as ranks:
        ways: dict[str, Ranks | list[str]]
        if ranks:
            ways = {str(ranks.count): ranks}
        else:
            counts = asked.counts or [n for n in (2, 4, 8) if n <= max(gpus, 2)]
            ways = {str(n): [f"cuda:{i}" if gpus else "cpu" for i in range(n)] for n in counts}
        first = "cpu" if not gpus else ranks.device if ranks else "cuda:0"
        return int(not all([shared(case, ways, ranks, asked.runs) for case in cases(asked, weights, first)]))


def shared(
    case: tuple[VideoVAE, tuple[int, int], int, str], ways: dict[str, Ranks | list[str]], ranks: Ranks | None, runs: int
) -> bool:
    """Time a case by each count of devices and by one alone, which other ranks wait for; return True for equal bits."""
    vae, size, frames, name = case
    z = seeded_input(vae, "decoder", frames, *size)
    writes = ranks is None or ranks.rank == 0
    reports: dict[str, Report | None] = {}

    def decode(way: str) -> Tensor | None:
        made = None
        if way in ways:
            made = vae.decode(z, output="uint8", devices=ways[way])
        elif writes:
            made = vae.decode(z, output="uint8")
        reports[way] = vae.last_report
        if ranks:  # all begin the next call together
            ranks.gather(None)
        return made

    seconds, made = in_turns({way: partial(decode, way) for way in ("one", *ways)}, runs, vae.device)
    each = {way: Spread.of(times[1:], 1e3 / frames) for way, times in seconds.items()}
    taken = {way: None if report is None else report.reserved_gb for way, report in reports.items()}
    reserved = {way: ranks.gather(gb) if ranks else [gb] for way, gb in taken.items()}
    same = {way: writes and torch.equal(made["one"], made[way]) for way in ways}
    for way in ways if writes else ():
        print(f"{name}: {way} devices by segments {each[way]} ms a frame, one {each['one']}: "
              f"{each['one'].median / each[way].median:.3f} times, computed {computed(vae, z, int(way)):.2f}; "
              f"stated GB {reports[way].predicted_gb}, reserved {reserved[way]}, one {reserved['one'][0]}; bits "
              f"{'equal' if same[way] else 'DIFFER'}", flush=True)  # fmt: skip
    return all(same.values()) or not writes


def computed(vae: VideoVAE, z: Tensor, count: int) -> float:
    """Return the speedup over one device by the number of the steps' operations."""
    latents, height, width = z.shape[2:]
    leads, rates = leads_of(vae.model.decoder.program, height, width, latents), [1.0] * count
    return (latents + leads(0)) / duration(split(leads, latents, rates), rates)


# -- stream ------------------------------------------------------------------------------------------------------------


def stream(asked: argparse.Namespace) -> int:
    """Time a decode and a stream, and measure the process's memory on the way (Linux)."""
    weights = calm(random_checkpoint(architecture=by_name(asked.weights)))
    for vae, (width, height), frames, name in cases(asked, weights, asked.device):
        size = height // vae.spatial, width // vae.spatial
        short, long = (
            slow(noise_latent(vae.latent_channels, -(-count // 16) + 1, *size), count)
            for count in map(vae.architecture.latents, (asked.decode, frames))
        )
        seconds, made = in_turns({"decode": partial(vae.decode, short, output="uint8")}, asked.runs, vae.device)
        count = made.pop("decode").shape[1]
        each = Spread.of(seconds["decode"][1:], 1e3 / count)
        print(f"{name}: decode of {count} frames: {each} ms a frame", flush=True)
        streamed(vae, long, asked.mp4)
    return 0


def changes(asked: argparse.Namespace) -> int:
    """Time the look for changed weights, of those in host memory and of those on the device."""
    weights = random_checkpoint(architecture=by_name(asked.weights))
    for home in dict.fromkeys(("cpu", asked.device)):
        vae = load(copy_of(weights), asked.precisions[0], asked.device, weights_on=torch.device(home))
        stamp = Stamp(vae.model)
        for half in (half for half in HALVES if getattr(vae.model, half) is not None):
            times = []
            for _ in range(asked.runs + 1):
                if vae.device.type == "cuda":
                    torch.cuda.synchronize(vae.device)
                begin = time.perf_counter()
                same = stamp.holds(vae.model, half)
                times.append(time.perf_counter() - begin)
                if not same:
                    raise ZeroWasteError(f"{asked.weights} {half}: unchanged weights were taken for changed ones")
            size = sum(t.nbytes for t in getattr(vae.model, half).parameters()) / 1e6
            print(f"{asked.weights} {half} {vae.precision}, {size:.0f} MB on {home}, ms a call: "
                  f"{Spread.of(times[1:], 1e3)}", flush=True)  # fmt: skip
        del vae, stamp
    return 0


# -- decoders ----------------------------------------------------------------------------------------------------------


def decoders(asked: argparse.Namespace) -> int:
    """Time each decoder that a family has published, in its family's tiles and in those that it was trained in."""
    family, device = by_name(asked.weights), torch.device(asked.device)
    published = family.published
    for config in dict.fromkeys((published.config, *(other for _, other in published.others))):
        weights = random_checkpoint(replace(config, encoder_widths=None), architecture=family, device=device)
        named = family.variant(config) or ("published" if config == published.config else "of other sizes")
        for vae, size, frames, name in cases(asked, weights, device):
            z = seeded_input(vae, "decoder", frames, *size)
            trained = getattr(vae.model.decoder.program, "trained", None) is not None
            for tiles in ("family", "trained") if trained else ("family",):
                figures, _ = time_calls(partial(vae.decode, z, native_tiles=tiles), asked.runs, vae.device)
                each = Spread(*(1e3 * figures[key] / frames for key in ("median_s", "low_s", "high_s")), asked.runs)
                taken = "memory not measured" if figures["reserved_gb"] is None else f"{figures['reserved_gb']:.2f} GB"
                print(f"{name}, {named}, tiles {tiles}: {each} ms a frame, first call "
                      f"{figures['first_s']:.1f} s, {taken} ({vae.last_report.predicted_gb:.2f} stated); "
                      f"{vae.last_report.plan}", flush=True)  # fmt: skip
    return 0


def calm(checkpoint: Checkpoint) -> Checkpoint:
    """Scale the last convolution of SeedVR2 and Wan, for frames with a fiftieth of the contrast.

    Frames of random weights are noise, and this much of it takes the bits of a film (about one per pixel)."""
    for name in ("decoder.conv_out.weight", "decoder.head.2.weight"):
        if name in checkpoint.tensors:
            checkpoint.tensors[name] = checkpoint.tensors[name] * 0.02
    return checkpoint


def slow(noise: Tensor, count: int) -> Tensor:
    """Interpolate [1, C, n, h, w] in time to `count` latents."""
    flat = noise.movedim(2, -1).flatten(0, -2)[None]
    wide = F.interpolate(flat, count, mode="linear", align_corners=True)[0]
    return wide.view(*noise.shape[:2], *noise.shape[3:], count).movedim(-1, 2).contiguous()


def streamed(vae: VideoVAE, z: Tensor, file: Path | None) -> None:
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
    held = ", ".join(f"{(size or 0) / 2**30:.3f} at frame {at}" for at, size in marks.items())
    said = f"stream of {count} frames: {1e3 * took / count:.2f} ms a frame"
    if file is not None:
        said = f"{file}, {file.stat().st_size / 2**20:.1f} MiB: {said}, {1e3 * waited / count:.2f} for the encoder"
    print(f"{said}; GiB of the process: {held}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ZeroWasteError as error:
        sys.exit(f"error: {error}")
