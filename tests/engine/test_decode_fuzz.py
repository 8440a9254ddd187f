"""decode() under options at random, call after call on one VAE: the very frames, or the same refusal, of a VAE that was
loaded for that call alone, and the frames of a plain whole decode where the options are exact.

ZEROWASTE_DECODE_FUZZ sets the number of calls (default 50; 500 for a longer run by hand).
"""

from __future__ import annotations

import os
import random
from contextlib import suppress

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.errors import Cancelled, ZeroWasteError
from zerowaste_vae.engine.options import DEFAULTS, TOGGLES
from zerowaste_vae.engine.request import NATIVE_BLENDS, TILINGS
from zerowaste_vae.engine.runtime.pixels import OUTPUTS

from .families.originals import close
from .families.small import SMALL, small

#: What a plan depends on.
PLANNED = ("tiling", "tile", "overlap", "chunk", "vram_gb", "ram_gb", "native_blend")
COUNT = int(os.environ.get("ZEROWASTE_DECODE_FUZZ", "50"))


@pytest.fixture(autouse=True)
def on_references(monkeypatch):
    """The fused path on a CPU."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)


def fresh(name):
    return load(small(name), "fp32", "cpu")


def latent_of(rng, vae, name):
    latents = 2 if name == "ltx-diffusion" else rng.randint(1, 3)
    if vae.architecture.temporal == 1:
        latents = 1 if vae.architecture.still else rng.randint(1, 4)
    shape = rng.randint(1, 2), vae.latent_channels, latents, rng.randint(1, 2), rng.randint(2, 3)
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(9)))


def options_of(rng, vae, z):
    """Options, most of them left out; a few are impossible."""
    s, count = vae.spatial, vae.frames(z.shape[2])
    first = rng.choice((0, count // 2, count - 1))
    choices = {
        "tiling": TILINGS, "tile": (0, 2 * s, 3 * s, 8 * s), "overlap": (None, 0, s), "chunk": (0, 1, 2, 5),
        "vram_gb": (None, 0, 0.25, 1), "ram_gb": (None, 0, 0.25, 1), "output": tuple(OUTPUTS),
        "native_blend": NATIVE_BLENDS if vae.architecture.in_tiles else NATIVE_BLENDS[:1],
        "start": (first,), "frames": (None, 1, count - first), "any_vae": (False, True),
        "devices": (None, "auto"), "mixed_devices": (False, True),
    }  # fmt: skip
    takes = vae.model.config
    if getattr(takes, "timestep", None) is not None:
        choices["timestep"] = (None, 0.0, 0.3)
    if getattr(takes, "noise", 0.0) or hasattr(takes, "begins_with_noise"):
        choices["seed"] = (None, 0, 7)
    odd = {"tile": s + 1, "vram_gb": 1e-6, "start": count, "frames": count + 1, "seed": 2**64, "noise": 0.5,
           "timestep": 0.5, "native_blend": "separate", "ram_gb": 1e-6, "chunk": -1, "tiling": "whole",
           "devices": "cpu", "overlap": 64 * s}  # fmt: skip
    chosen = {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.4}
    return chosen | {name: value for name, value in odd.items() if rng.random() < 0.015}


def outcome(vae, z, options, given, stop=None):
    """The frames and whether they are approximate, or the words of a refusal."""
    plans = []
    cancel = None if stop is None else iter([False] * stop + [True] * 999).__next__
    try:
        plan = None
        if "plan" in given:
            asked = {n: v for n, v in options.items() if n in PLANNED}
            plan = vae.plan_decode(*z.shape[2:], **asked)
        frames = vae.decode(z, **options, plan=plan, on_plan=plans.append, cancel=cancel)
    except ZeroWasteError as error:
        return str(error), True
    assert frames.dtype == OUTPUTS[options.get("output", "float32")]
    return frames, any(plan.tiled for plan in plans)


def reference(vae, z, options):
    """The wanted frames out of a whole decode."""
    kept = {n: options[n] for n in ("seed", "noise", "timestep", "native_blend", "output") if n in options}
    whole, start = vae.decode(z, **kept), options.get("start", 0)
    frames = options.get("frames")
    return whole[:, start : None if frames is None else start + frames]


@pytest.mark.parametrize("name", SMALL)
def test_options_at_random(name):
    lived, calls, said = fresh(name), -(-COUNT // len(SMALL)), 0
    for seed in range(calls):
        rng = random.Random(f"{name} {seed}")
        z = latent_of(rng, lived, name)
        options = options_of(rng, lived, z)
        off = rng.sample(list(TOGGLES), rng.randint(0, 2)) if rng.random() < 0.4 else []
        toggles = DEFAULTS.switched(off=off)
        given = ["plan"] if rng.random() < 0.2 else []
        note = f"seed {seed}: {tuple(z.shape)} {options} off={off} {given}"
        if rng.random() < 0.3:  # a run that is stopped leaves nothing behind
            with suppress(Cancelled):
                outcome(lived.with_options(toggles), z, options, given, rng.randint(0, 3))
        mine, tiled = outcome(lived.with_options(toggles), z, options, given)
        other, _ = outcome(fresh(name).with_options(toggles), z, options, given)
        if isinstance(mine, str) or isinstance(other, str):
            assert mine == other, note
            assert len(mine.splitlines()) == 1, note
            said += 1
            continue
        assert torch.equal(mine, other), note
        if not tiled and options.get("tiling") != "blended":
            expected = reference(fresh(name), z, options).float()
            scale = 255 if options.get("output") == "uint8" else 1
            assert (mine.float() - expected).abs().max() <= scale * (1 / 255 if scale > 1 else 2e-3), note
            if options.get("output", "float32") == "float32":
                close(mine, expected, 1e-4)
    assert said < max(calls, 6)  # fewer calls may all be refused
