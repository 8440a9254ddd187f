"""Winograd convolutions in a network: chosen by layer, and the same bits in every plan."""

from dataclasses import dataclass

import pytest
import torch
from zerowaste_vae.engine.kernels.conv3d.winograd import schedules
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.network.ops.conv import Conv
from zerowaste_vae.engine.network.ops.ends import Moments, Pixels
from zerowaste_vae.engine.network.ops.norm import Group, Length
from zerowaste_vae.engine.network.ops.resnet import Res
from zerowaste_vae.engine.network.ops.shuffle_up import ShuffleUp
from zerowaste_vae.engine.network.ops.strided_down import StridedDown
from zerowaste_vae.engine.network.plain import Network
from zerowaste_vae.engine.network.program import STEP, TILES, Program
from zerowaste_vae.engine.operands.forms import Operands
from zerowaste_vae.engine.operands.policy import Policy, eligible
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.precision import prepared, sampling
from zerowaste_vae.engine.run.handover import hand_over, take_over
from zerowaste_vae.engine.run.parking import Parking

CPU = torch.device("cpu")
WINOGRAD = DEFAULTS.switched(on=["winograd"])
KEYS = frozenset({"decoder.wide.0.conv2", "decoder.grow.conv"})


@dataclass(frozen=True)
class Config:
    decoder_widths: tuple[int, int] = (32, 32)
    encoder_widths: tuple[int, int] = (32, 32)
    latent_channels: int = 8
    norm_groups: None = None


def decoder(norm, temporal=True):
    return Program.of(
        "decoder", 8,
        Conv("enter", 8, 32), Res("deep.0", 32, 32, norm), TILES,
        ShuffleUp("grow", 32, temporal), STEP,
        Res("wide.0", 32, 32, norm), Pixels("leave.norm", "leave.conv", 32, norm),
    )  # fmt: skip


def encoder(norm):
    return Program.of(
        "encoder", 3,
        Conv("enter", 3, 32), Res("wide.0", 32, 32, norm), STEP,
        StridedDown("shrink", 32, True), TILES, Res("deep.0", 32, 32, norm), Moments("leave.norm", "leave.conv", 32, 8, norm),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Layers of 32 channels take it, too."""
    monkeypatch.setattr(schedules, "LEAST", 32)


@pytest.fixture(scope="module")
def build(seed_model):
    def make(program, dtype):
        model = Network(Config(), None, program).requires_grad_(False)
        seed_model(model, 5)
        return model.to(dtype).decoder

    return make


def decode(network, z, chunk, frames, parking=None):
    run = network.plan(chunk, *z.shape[1:3], frames, torch.float32, CPU, parking)
    planned, out = run.nbytes, []
    run.allocate()
    for part in z.split(chunk):
        run.scout(lambda part=part: network.chunk(run, part, frames, torch.float32, out.append))
        network.chunk(run, part, frames, torch.float32, lambda pixels: out.append(pixels.clone()))
    assert run.nbytes == planned
    return torch.cat(out)


PLANS = [
    (5, 0, None), (1, 1, None), (2, 3, None), (5, 2, Parking(None, 0)), (2, 1, Parking(None, 0, buffers=3)),
    (3, 2, Parking(KEYS, 0)), (2, 0, Parking(None, 1 << 30, near=1 << 20)),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "fp8", "int8"])
@pytest.mark.parametrize("norm", [Group(4), Length()], ids=["group", "length"])
@torch.no_grad()
def test_every_plan_has_the_same_bits(build, norm, kind):
    """Two bands of rows, an odd width, planes in rings and made of parked bands."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float16
    half = build(decoder(norm), dtype)
    z, operands = torch.randn(5, 34, 3, 8), None
    reader = sampling.Reader()
    exact = sampling.decode(fuse(half, dtype), z, reader)
    if kind in ("fp8", "int8"):
        policy = Policy(dict.fromkeys(eligible(half), kind), reader.ranges())
        operands = Operands(dtype, policy, winograd=True)
    network = fuse(half, dtype, WINOGRAD, operands)
    whole, *others = (decode(network, z, *plan) for plan in PLANS)
    assert all(torch.equal(whole, other) for other in others)
    db = sampling.decibel(sampling.mse([sampling.decode(network, z)], [exact]))
    assert {"float16": 50, "bfloat16": 35, "fp8": 20, "int8": 20}[kind] < db < 100
