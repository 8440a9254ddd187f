"""What plans state for plain torch, against the bytes that torch's allocator hands out for the same program."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from zerowaste_vae.engine.archs import seedvr2, wan
from zerowaste_vae.engine.kernels import exact
from zerowaste_vae.engine.network.stream import (
    decode_features,
    decode_frames,
    encode_features,
    encode_moments,
    frame_spans,
)
from zerowaste_vae.engine.planning.plain_walk import PlainWalk
from zerowaste_vae.engine.run.plan import Steps

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


def program(model, half, steps, latents):
    check = lambda: None  # noqa: E731

    def decode():
        chunks = (torch.zeros(1, 16, min(steps.latents, latents - i), ROWS, COLS) for i in range(0, latents,
                                                                                                 steps.latents))
        for chunk in decode_frames(model.decoder, decode_features(model.decoder, chunks, check), steps, check):
            drain(chunk)

    def encode():
        spans = frame_spans(4 * (latents - 1) + 1, steps.latents, 4)
        video = (torch.zeros(1, 3, b - a, 8 * ROWS, 8 * COLS) for a, b in spans)
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
    stated = walk.peak(half, latents, steps, (ROWS, COLS), (ROWS, COLS), (0, 0), True)
    real = taken(program(model, half, steps, latents))
    assert real <= stated <= 1.05 * real
    assert walk.peak(half, latents, steps, (ROWS, COLS), (ROWS, COLS), (0, 0), False) < real  # as cuDNN has it
