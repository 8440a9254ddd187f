"""The demo: encode and decode the shipped clip, and draw a contact sheet of the result."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ...vae import VideoVAE
from ..media.clips import read_video
from . import metrics

#: bar(label) is a context manager that yields a progress callback
Bar = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]

#: The contact sheet shows |reconstruction - source| times this, so that errors of a few grey levels become visible.
DIFFERENCE_GAIN = 5
SHEET_FRAMES = 4
_MARGIN, _GAP, _LABEL, _HEAD, _CAPTION = 28, 10, 150, 84, 26
_PAPER, _INK, _DIM = (18, 20, 24), (236, 238, 242), (150, 156, 168)


@dataclass(frozen=True)
class Demo:
    """Result of one run: float32 frames [F, H, W, 3] in 0..1, the latent, seconds and the peak in bytes."""

    source: Tensor
    result: Tensor
    latent: Tensor
    fps: Fraction
    encode_seconds: float
    decode_seconds: float
    peak_bytes: int | None
    precision: str
    device: str

    @property
    def psnr(self) -> float:
        return psnr(self.source, self.result)


def psnr(source: Tensor, result: Tensor) -> float:
    """Return the PSNR in dB of frames in 0..1, with peak 1; infinite for equal frames."""
    return metrics.psnr((source.double() - result.double().clamp(0, 1)).square().mean().item())


def run_demo(vae: VideoVAE, clip: Path, bar: Bar) -> Demo:
    """Encode and decode `clip` (4n + 1 frames, sides multiples of 8). The seconds are those of the VAE's work alone."""
    source, fps = read_video(clip)
    if vae.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(vae.device)
    with bar("encode") as report:
        began = time.perf_counter()
        latent = vae.encode(source, progress=report)
        encode_seconds = time.perf_counter() - began
    with bar("decode") as report:
        began = time.perf_counter()
        result = vae.decode(latent, progress=report)[0]
        decode_seconds = time.perf_counter() - began
    peak = peak_memory(vae.device)
    return Demo(source, result, latent, fps, encode_seconds, decode_seconds, peak, vae.precision, str(vae.device))


def peak_memory(device: torch.device) -> int | None:
    """Return the peak bytes reserved by torch on a GPU, else this process's largest resident size; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    if sys.platform == "win32":
        return _windows_peak()
    try:
        # Not getrusage on Linux: its figure starts from the memory of the process that started this one.
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _windows_peak() -> int | None:
    class Counters(ctypes.Structure):
        names = ("peak", "now", "pool1", "pool2", "pool3", "pool4", "pagefile", "pagefile_peak")
        _fields_ = (("length", ctypes.c_ulong), ("faults", ctypes.c_ulong), *((n, ctypes.c_size_t) for n in names))

    counters = Counters(length=ctypes.sizeof(Counters))
    kernel = ctypes.windll.kernel32
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    kernel.K32GetProcessMemoryInfo.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulong)
    if not kernel.K32GetProcessMemoryInfo(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.length):
        return None
    return int(counters.peak)


def contact_sheet(demo: Demo) -> Image.Image:
    """Draw rows of source, reconstruction (with each frame's PSNR) and amplified difference; columns are frames."""
    count, height, width, _ = demo.source.shape
    shown = [round(i * (count - 1) / (SHEET_FRAMES - 1)) for i in range(SHEET_FRAMES)]
    pitch_x, pitch_y = width + _GAP, height + _CAPTION + _GAP
    size = (2 * _MARGIN + _LABEL + SHEET_FRAMES * pitch_x - _GAP, _MARGIN + _HEAD + 3 * pitch_y)
    sheet = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(sheet)
    title, text, small = (ImageFont.load_default(points) for points in (26, 18, 14))
    draw.text((_MARGIN, _MARGIN - 6), "Zero-Waste VAE: one clip, encoded and decoded", fill=_INK, font=title)
    pixels, values = demo.source.numel(), demo.latent.numel()
    facts = f"{count} frames {width} x {height} | {pixels / values:.0f} pixel values to 1 latent value | "
    facts += f"PSNR {demo.psnr:.2f} dB | {demo.precision} on {demo.device}"
    draw.text((_MARGIN, _MARGIN + 30), facts, fill=_DIM, font=text)
    difference = (demo.result - demo.source).abs() * DIFFERENCE_GAIN
    rows = (
        ("Source", "", demo.source),
        ("Reconstruction", "latent decoded", demo.result),
        ("Difference", f"absolute, x {DIFFERENCE_GAIN}", difference),
    )
    for row, (label, note, frames) in enumerate(rows):
        top = _MARGIN + _HEAD + row * pitch_y
        draw.text((_MARGIN, top + height // 2 - 20), label, fill=_INK, font=text)
        draw.text((_MARGIN, top + height // 2 + 4), note, fill=_DIM, font=small)
        for column, index in enumerate(shown):
            left = _MARGIN + _LABEL + column * pitch_x
            picture = (frames[index].clamp(0, 1) * 255).round().to(torch.uint8).numpy()
            sheet.paste(Image.fromarray(picture), (left, top))
            if row == 0:
                caption = f"frame {index + 1} of {count}"
            elif row == 1:
                caption = f"{psnr(demo.source[index], demo.result[index]):.2f} dB"
            else:
                caption = f"mean {255 * difference[index].mean().item() / DIFFERENCE_GAIN:.1f} of 255"
            draw.text((left, top + height + 5), caption, fill=_DIM, font=small)
    return sheet
