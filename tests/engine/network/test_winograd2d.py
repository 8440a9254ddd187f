"""The Winograd form in registers in a network: chosen by layer and card, the same bits in every plan, on the buffers of
the direct form."""

from dataclasses import dataclass

import pytest
import torch
from zerowaste_vae.engine.archs import by_name
from zerowaste_vae.engine.calibration import sampling
from zerowaste_vae.engine.kernels.targets import capabilities, prebuilt
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.network.ops.conv import Conv
from zerowaste_vae.engine.network.ops.ends import Pixels
from zerowaste_vae.engine.network.ops.norm import Group, Length
from zerowaste_vae.engine.network.ops.resnet import Res
from zerowaste_vae.engine.network.ops.shortcut import ShortcutUp
from zerowaste_vae.engine.network.program import STEP, TILES, Program
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.fused_walk import FusedWalk
from zerowaste_vae.engine.precision.forms import Operands
from zerowaste_vae.engine.precision.policy import Policy, eligible
from zerowaste_vae.engine.runtime.parking import Parking
from zerowaste_vae.engine.tuning.layers import layers

CPU = torch.device("cpu")
WINOGRAD = DEFAULTS.switched(on=["winograd"])
PLANS = [
    (5, 0, None), (1, 1, None), (2, 3, None), (5, 2, Parking(None, 0)), (1, 1, Parking(None, 0, near=1 << 30)),
    (2, 0, Parking(None, 1 << 30, near=1 << 20)),
]  # fmt: skip


@dataclass(frozen=True)
class Config:
    decoder_widths: tuple[int, int] = (64, 64)
    encoder_widths: None = None
    latent_channels: int = 8
    norm_groups: None = None


def decoder(norm, **style):
    return Program.of(
        "decoder", 8,
        Conv("enter", 8, 64), Res("deep.0", 64, 64, norm), TILES,
        ShortcutUp("grow", 64, 64, temporal=True), STEP,
        Res("wide.0", 64, 64, norm), Pixels("leave.norm", "leave.conv", 64, norm), **style,
    )  # fmt: skip


def decode(network, z, chunk, frames, parking=None):
    run, out = network.plan(chunk, *z.shape[1:3], frames, torch.float32, CPU, parking), []
    run.allocate()
    for part in z.split(chunk):
        told = run, part, frames, torch.float32
        ends = run.done["latents"] + len(part) == len(z)
        run.scout(lambda told=told, ends=ends: network.chunk(*told, out.append, ends))
        network.chunk(*told, lambda pixels: out.append(pixels.clone()), ends)
    run.free()
    return torch.cat(out)


@pytest.mark.parametrize(("dtype", "norm", "style", "least"), [
    (torch.float16, Group(4), {}, 55), (torch.bfloat16, Length(), {"border": "replicate"}, 37),
], ids=["float16", "bfloat16"])  # fmt: skip
@torch.no_grad()
def test_every_plan_has_the_same_bits(build, convolutions, exact_sums, dtype, norm, style, least):
    """Two bands of rows, an odd width, rings and parked bands; near the direct form."""
    half, z = build(decoder(norm, **style), dtype), torch.randn(5, 34, 3, 8)
    direct = fuse(half, dtype, DEFAULTS)
    network = fuse(half, dtype, WINOGRAD, Operands(dtype, winograd=True, tiles=True))
    formed = {key for key, conv in convolutions(network).items() if conv.weight.tiles}
    assert formed == {"decoder.grow.conv", *(f"decoder.{n}.0.conv{i}" for n in ("deep", "wide") for i in (1, 2))}
    assert not any(conv.weight.winograd for conv in convolutions(network).values())
    whole, *others = (decode(network, z, *plan) for plan in PLANS)
    assert all(torch.equal(whole, other) for other in others)
    assert least < sampling.decibel(sampling.mse([whole], [decode(direct, z, 5, 0)])) < 120


@torch.no_grad()
def test_8_bit_layers_have_the_other_form(build, convolutions):
    """Which has planes. Their neighbours in 16 bit do not: the same history may serve either."""
    half = build(Program.of("decoder", 8, Conv("enter", 8, 128), Res("deep.0", 128, 128, Group(4)), TILES,
                            Res("wide.0", 128, 128, Group(4)), Pixels("n", "c", 128, Group(4))),
                 torch.float16)  # fmt: skip
    keys = [key for key in eligible(half) if "deep" in key]
    operands = Operands(torch.float16, Policy(dict.fromkeys(keys, "fp8"), {}), winograd=True, tiles=True)
    found = convolutions(fuse(half, torch.float16, WINOGRAD, operands))
    assert {key for key, conv in found.items() if conv.weight.winograd} == set(keys)
    assert {key for key, conv in found.items() if conv.weight.tiles} == {f"decoder.wide.0.conv{i}" for i in (1, 2)}


@pytest.mark.parametrize(("name", "dtype"), [("seedvr2", torch.float16), ("wan2.1", torch.bfloat16)])
def test_published(convolutions, name, dtype):
    """Most work of a published network has this form where the card's target says so, and plans state the memory of the
    direct form, with at most 16/9 of the weights."""
    one = by_name(name)
    direct, tiled, planes = (FusedWalk(one, one.published.config, dtype, o) for o in (DEFAULTS, WINOGRAD, WINOGRAD))
    tiled.tiles = lambda half: True
    for half in ("decoder", "encoder"):
        assert not any(c.weight.tiles for walk in (direct, planes) for c in convolutions(walk.network(half)).values())
        assert not any(c.weight.winograd for c in convolutions(tiled.network(half)).values())
        calls = tiled.run(half, 45, 80).calls.values()
        assert sum(c.work for c in calls if c.weight.tiles) > 0.6 * sum(c.work for c in calls)
        sizes = [walk.sizes(half, 1, 1, 90, 160, torch.float32).device for walk in (direct, tiled)]
        weights = [walk.network(half).nbytes for walk in (direct, tiled)]
        assert weights[0] < weights[1] <= 16 / 9 * weights[0]
        assert sizes[1] - sizes[0] <= weights[1] - weights[0] + (1 << 20)


def test_tuning_leaves_it_alone():
    """Each width has one schedule: what is tuned are the layers of other forms."""
    one, here = by_name("seedvr2"), prebuilt("card", 120, "C")
    walk = FusedWalk(one, one.published.config, torch.float16, WINOGRAD)
    walk.tiles = lambda half: True
    kinds = [layer.kind for layer in layers(walk, here)]
    assert kinds and not any(k.channels == k.outputs and k.phases == 1 and not k.strided for k in kinds)


@pytest.mark.parametrize(("sm", "letter", "tiles"), [
    (86, "", True), (89, "", True), (120, "", True), (86, "A", True), (120, "C", True), (80, "", False),
    (90, "", False), (100, "", False),
])  # fmt: skip
def test_cards(sm, letter, tiles):
    """Consumer cards, by Triton's code for them or by a set's."""
    here = prebuilt("card", sm, letter) if letter else capabilities("card", sm, (3, 6))
    assert here.tiles == tiles
