"""Compare stated peaks of plain torch with the bytes that its allocator hands out for the same program."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from zerowaste_vae.engine.families import cosmos, hunyuan, hunyuan15, hunyuan_refiner, kl, ltx, mochi, seedvr2, wan
from zerowaste_vae.engine.kernels import exact
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.network.stream import (
    decode_features,
    decode_frames,
    encode_features,
    encode_moments,
    frame_spans,
)
from zerowaste_vae.engine.planning import dryrun, plain_walk
from zerowaste_vae.engine.planning.dryrun import PeakMemory, peak_bytes
from zerowaste_vae.engine.planning.meta import meta_model
from zerowaste_vae.engine.planning.plain_walk import PlainWalk, Torch
from zerowaste_vae.engine.runtime.pixels import to_network

SEEDVR2 = seedvr2.ARCHITECTURE, seedvr2.Config((16, 32, 64, 64), (16, 32, 64, 64), norm_groups=4)
WAN = wan.WAN21, wan.Config((16, 32, 64, 64), (16, 32, 64, 64))
ROWS, COLS = 6, 8


class Products(TorchFunctionMode):
    """Convolutions as fp32 has them on a GPU, on any device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.conv3d:
            return exact.conv3d(*args[:5])
        return func(*args, **(kwargs or {}))


def taken(program) -> int:
    """Most bytes that lived at once of all that torch's CPU allocator gave while `program` ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found, torch.no_grad(), Products():
        program()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def drain(parts) -> None:
    """None of them is kept while the next one is made."""
    deque(parts, 0)


def program(model, architecture, half, steps, latents, device="cpu"):
    """All of a clip through a half of a model in fp32."""
    check, s, t = lambda: None, architecture.spatial, architecture.temporal

    def decode():
        sizes = (min(steps.latents, latents - i) for i in range(0, latents, steps.latents))
        chunks = (torch.zeros(1, model.config.latent_channels, n, ROWS, COLS, device=device) for n in sizes)
        for chunk in decode_frames(model.decoder, decode_features(model.decoder, chunks, check), steps, check):
            drain(chunk)

    def encode():
        spans = frame_spans(t * (latents - 1) + 1, steps.latents, t)
        sizes = ((1, b - a, s * ROWS, s * COLS, 3) for a, b in spans)
        video = (to_network(torch.zeros(n, device=device), torch.device(device), torch.float32) for n in sizes)
        drain(encode_moments(model.encoder, encode_features(model.encoder, video, steps, check), check))

    return decode if half == "decoder" else encode


@pytest.mark.parametrize(
    ("family", "half", "steps"),
    [(SEEDVR2, "decoder", Steps(1, 1)), (SEEDVR2, "decoder", Steps(2, 3)), (SEEDVR2, "encoder", Steps(2, 1)),
     (SEEDVR2, "encoder", Steps(1, 0)), (WAN, "decoder", Steps(1, 1)), (WAN, "encoder", Steps(2, 3))],
    ids=lambda x: str(x) if isinstance(x, (str, Steps)) else x[0].name,
)  # fmt: skip
def test_fp32_by_products_takes_what_is_stated(family, half, steps):
    architecture, config = family
    model = architecture.build(config).requires_grad_(False)
    walk = PlainWalk(architecture, config, torch.float32, True)
    latents = 2 * steps.latents
    stated = walk.peak(half, latents, steps, (ROWS, COLS), (ROWS, COLS), (0, 0), Torch(products=True))
    real = taken(program(model, architecture, half, steps, latents))
    assert real <= stated <= 1.05 * real
    assert walk.peak(half, latents, steps, (ROWS, COLS), (ROWS, COLS), (0, 0), Torch()) < real  # as cuDNN has it


LTX = (64, None), (32, "all"), (16, "all"), (8, "time"), (4, "space")
BLOCKS = tuple(
    b for width, kind in LTX
    for b in ([ltx.Block(width, stride=ltx.STRIDES[kind])] if kind else []) + [ltx.Block(width, 1)]
)  # fmt: skip
MOCHI = (mochi.Level(32, 1), *(mochi.Level(32, 1, s) for s in ((3, 2, 2), (2, 2, 2), (1, 2, 2))), mochi.Level(16, 1))
MOCHI_DOWN = (mochi.Level(32, 1), *(mochi.Level(32, 1, s, True) for s in ((1, 2, 2), (2, 2, 2), (3, 2, 2))),
              mochi.Level(32, 1, None, True))  # fmt: skip
FAMILIES = [
    SEEDVR2, WAN,
    (ltx.ARCHITECTURE, ltx.Config(None, BLOCKS, 0, 64, latent_channels=16, decoder_border="zero")),
    (mochi.ARCHITECTURE, mochi.Config(MOCHI_DOWN, MOCHI, norm_groups=8)),
    (cosmos.ARCHITECTURE, cosmos.Config((16, 32, 32), (16, 32, 32), 16)),
    (hunyuan.ARCHITECTURE, hunyuan.Config((8, 16, 16, 24), (8, 16, 16, 24), 4, norm_groups=4)),
    (hunyuan15.ARCHITECTURE, hunyuan15.Config((8, 8, 16, 32, 64), (8, 16, 32, 32, 64), 16)),
    (hunyuan_refiner.ARCHITECTURE, hunyuan_refiner.Config((8, 8, 16, 32, 32), (8, 16, 16, 32, 32), 16, norm_groups=8)),
    (kl.FLUX, kl.Config((16, 32, 64, 64), (16, 32, 64, 64), 16, 16, norm_groups=4)),
]


@pytest.mark.parametrize(
    ("family", "half"),
    [(f, half) for f in FAMILIES for half in ("decoder", "encoder") if getattr(f[1], f"{half}_widths")],
    ids=lambda x: x if isinstance(x, str) else x[0].name,
)  # fmt: skip
def test_sampled_walk(family, half):
    """Also at a clip's end, where networks that look ahead give all that has waited, and where something of every frame
    stays."""
    architecture, config = family
    model, walk = meta_model(architecture, config), PlainWalk(architecture, config, torch.float32, True)
    for steps, latents in ((Steps(1, 0), 9), (Steps(2, architecture.temporal), 7)):
        stated = walk.peak(half, latents, steps, (ROWS, COLS), (ROWS, COLS), (0, 0), Torch(products=True))
        whole = program(model, architecture, half, steps, latents, "meta")
        real = peak_bytes(whole, PeakMemory(products=True))
        assert 0.99 * real <= stated <= 1.01 * real, steps


@pytest.mark.parametrize(
    ("family", "half"),
    [(f, half) for f in FAMILIES for half in ("decoder", "encoder") if getattr(f[1], f"{half}_widths")],
    ids=lambda x: x if isinstance(x, str) else x[0].name,
)  # fmt: skip
def test_repeated_steps(monkeypatch, family, half):
    """Steps that repeat take and reserve what they did."""
    architecture, config = family
    counts, peaks = [], []
    dispatch = dryrun.PeakMemory.__torch_dispatch__

    def counted(self, *args, **options):
        counts[-1] += 1
        return dispatch(self, *args, **options)

    monkeypatch.setattr(dryrun.PeakMemory, "__torch_dispatch__", counted)
    for each, unseen in ((plain_walk.repeated, plain_walk.unseen), (lambda part, *_: part, nullcontext)):
        monkeypatch.setattr(plain_walk, "repeated", each)
        monkeypatch.setattr(plain_walk, "unseen", unseen)
        walk = PlainWalk(architecture, config, torch.float32, True)
        counts.append(0)
        peaks.append([
            walk.peak(half, latents, steps, (ROWS, COLS), tile, (0, 0), how)
            for steps, latents in ((Steps(1, 1), 6), (Steps(2, 0), 5))
            for tile, how in (((ROWS, COLS), Torch(products=True, reserves=True)), ((4, 4), Torch()))
        ])  # fmt: skip
    assert peaks[0] == peaks[1]
    many = architecture in (ltx.ARCHITECTURE, mochi.ARCHITECTURE, cosmos.ARCHITECTURE)  # of single frames
    assert counts[0] <= (0.8 if many else 1.0) * counts[1]


def test_what_looks_far_ahead_is_walked_as_far():
    """As LTX 0.9.1: once, and longer clips take the same."""
    blocks = tuple(
        b for layers, kind in ((8, ""), (7, "all"), (6, "all"), (5, "all"))
        for b in ([ltx.Block(16, stride=ltx.STRIDES[kind])] if kind else []) + [ltx.Block(16, layers)]
    )  # fmt: skip
    config = ltx.Config(None, blocks, 0, 16, latent_channels=16)
    walk, steps, how = PlainWalk(ltx.ARCHITECTURE, config, torch.float16, True), Steps(1, 0), Torch(reserves=True)
    stated = walk.peak("decoder", 100_000, steps, (ROWS, COLS), (ROWS, COLS), (0, 0), how)
    assert walk._clip.cache_info().currsize == 1
    for latents in (34, 66):
        walked = walk._clip("decoder", latents, steps, (ROWS, COLS), (0, 0), 0, how)
        assert walked.reserved == pytest.approx(stated, 0.01)
