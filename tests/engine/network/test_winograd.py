"""Winograd convolutions in a network: chosen by layer, and the same bits in every plan."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae.engine.archs import ARCHITECTURES, kl
from zerowaste_vae.engine.archs.seedvr2 import ARCHITECTURE
from zerowaste_vae.engine.archs.seedvr2 import Config as Published
from zerowaste_vae.engine.calibration import sampling
from zerowaste_vae.engine.execution.fused_pass import FusedPass
from zerowaste_vae.engine.kernels.conv3d.winograd import schedules
from zerowaste_vae.engine.kernels.targets import FP8
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.network.ops.conv import Conv
from zerowaste_vae.engine.network.ops.ends import Pixels
from zerowaste_vae.engine.network.ops.norm import Group, Length
from zerowaste_vae.engine.network.ops.resnet import Res
from zerowaste_vae.engine.network.ops.shortcut import ShortcutUp
from zerowaste_vae.engine.network.ops.up import ShuffleUp
from zerowaste_vae.engine.network.program import STEP, TILES, Program
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.fused_walk import FusedWalk
from zerowaste_vae.engine.precision import prepared
from zerowaste_vae.engine.precision.forms import Operands
from zerowaste_vae.engine.precision.policy import Policy, eligible
from zerowaste_vae.engine.runtime.handover import hand_over, take_over
from zerowaste_vae.engine.runtime.parking import Parking

CPU = torch.device("cpu")
WINOGRAD = DEFAULTS.switched(on=["winograd"])
KEYS = frozenset({"decoder.wide.0.conv2", "decoder.grow.conv"})


@dataclass(frozen=True)
class Config:
    decoder_widths: tuple[int, int] = (32, 32)
    encoder_widths: None = None
    latent_channels: int = 8
    norm_groups: None = None


def decoder(norm):
    return Program.of(
        "decoder", 8,
        Conv("enter", 8, 32), Res("deep.0", 32, 32, norm), TILES,
        ShuffleUp("grow", 32, temporal=True), STEP,
        Res("wide.0", 32, 32, norm), Pixels("leave.norm", "leave.conv", 32, norm),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Layers of 32 channels take it, too."""
    monkeypatch.setattr(schedules, "WIDTH", 32)


def decode(network, z, chunk, frames, parking=None):
    run = network.plan(chunk, *z.shape[1:3], frames, torch.float32, CPU, parking)
    planned, out = run.nbytes, []
    run.allocate()
    for part in z.split(chunk):
        told = run, part, frames, torch.float32
        ends = run.done["latents"] + len(part) == len(z)
        run.scout(lambda told=told, ends=ends: network.chunk(*told, out.append, ends))
        network.chunk(*told, lambda pixels: out.append(pixels.clone()), ends)
    assert run.nbytes == planned
    run.free()
    return torch.cat(out)


PLANS = [
    (5, 0, None), (1, 1, None), (2, 3, None), (5, 2, Parking(None, 0)), (2, 1, Parking(None, 0, buffers=3)),
    (3, 2, Parking(KEYS, 0)), (2, 0, Parking(None, 1 << 30, near=1 << 20)), (1, 1, Parking(None, 0, near=1 << 30)),
    (1, 2, Parking(None, 0, near=3 << 16)), (2, 3, Parking(None, 0, near=1 << 30)),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "fp8", "int8"])
@pytest.mark.parametrize("norm", [Group(4), Length()], ids=["group", "length"])
@torch.no_grad()
def test_every_plan_has_the_same_bits(build, norm, kind, exact_sums):
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


REPLICATE, REFLECT = {"border": "replicate"}, {"border": "reflect", "head": "zero"}
AHEAD = {"after": 1}


#: Norm, and dB between both forms at least.
KINDS = {"float16": (Group(4), 70), "bfloat16": (Length(), 50), "fp8": (Group(4), 32), "int8": (Length(), 38)}
STYLED = [
    *itertools.product(KINDS, (REPLICATE,), ((70, 3), (3, 2), (1, 1))),
    *itertools.product(KINDS, (REFLECT,), ((2, 2),)), *itertools.product(("float16", "int8"), (REFLECT,), ((70, 3),)),
    # 8 bit is for networks that look at no later frame.
    *itertools.product(("float16", "bfloat16"), (AHEAD, AHEAD | REPLICATE), ((66, 3), (2, 5))),
]


@pytest.mark.parametrize(("kind", "style", "size"), STYLED, ids=str)
@torch.no_grad()
def test_other_borders_and_views_ahead(build, convolutions, exact_sums, kind, style, size):
    """The same bits in every plan, near the direct form's: two bands of rows, odd widths, frames of a single pixel."""
    norm, least = KINDS[kind]
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float16
    end = Pixels("leave.norm", "leave.conv", 32, norm, 2)
    steps = Conv("enter", 8, 32), TILES, Res("deep.0", 32, 32, norm), Res("wide.0", 32, 32, norm), end
    half, z = build(Program.of("decoder", 8, *steps, **style), dtype), torch.randn(3, *size, 8)
    reader, policy = sampling.Reader(), Policy()
    if kind in ("fp8", "int8"):
        sampling.decode(fuse(half, dtype), z, reader)
        policy = Policy(dict.fromkeys(eligible(half), kind), reader.ranges())
    direct, network = (fuse(half, dtype, DEFAULTS, Operands(dtype, policy, winograd=on)) for on in (False, True))
    formed = {key for key, conv in convolutions(network).items() if conv.weight.winograd}
    assert formed == {f"decoder.{name}.0.conv{i}" for name in ("deep", "wide") for i in (1, 2)}
    whole, *others = (decode(network, z, *plan) for plan in (*PLANS[:2], *PLANS[4:6], *PLANS[7:9]))
    assert all(torch.equal(whole, other) for other in others)
    db = sampling.decibel(sampling.mse([whole], [decode(direct, z, 3, 0)]))
    assert least < db < 120


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "int8"])
@torch.no_grad()
def test_upsamplers_with_a_shortcut(build, convolutions, exact_sums, kind):
    """In 16 bit, phase by phase from planes of what no norm bounds: the same bits in every plan, near the direct
    form's."""
    dtype, norm = torch.bfloat16 if kind == "bfloat16" else torch.float16, Length()
    steps = [
        Conv("enter", 8, 32), TILES, ShortcutUp("grow", 32, 64, temporal=True), STEP,
        ShortcutUp("widen", 64, 32, temporal=False), Res("wide.0", 32, 32, norm),
        Pixels("leave.norm", "leave.conv", 32, norm),
    ]  # fmt: skip
    half, z = build(Program.of("decoder", 8, *steps, **REPLICATE), dtype), torch.randn(5, 34, 3, 8)
    reader, policy = sampling.Reader(), Policy()
    if kind == "int8":
        sampling.decode(fuse(half, dtype), z, reader)
        policy = Policy(dict.fromkeys(eligible(half), kind), reader.ranges())
    direct, network = (fuse(half, dtype, DEFAULTS, Operands(dtype, policy, winograd=on)) for on in (False, True))
    formed = {key for key, conv in convolutions(network).items() if conv.weight.winograd}
    ups = {"decoder.grow.conv", "decoder.widen.conv"}
    assert formed & ups == (set() if kind == "int8" else ups)
    whole, *others = (decode(network, z, *plan) for plan in PLANS)
    assert all(torch.equal(whole, other) for other in others)
    db = sampling.decibel(sampling.mse([whole], [decode(direct, z, 5, 0)]))
    assert {"float16": 60, "bfloat16": 40, "int8": 38}[kind] < db < 120


@pytest.mark.parametrize("kind", ["fp16", "fp8"])
@torch.no_grad()
def test_equal_bits(seed_model, kind, exact_sums):
    """Pictures have the same bits in bands and whole."""
    model = kl.SD.build(kl.Config((32, 32), (32, 32), 4, 8, quantised=True, resnets=(1, 2), norm_groups=8))
    seed_model(model, 3)
    half, z, reader = model.half().requires_grad_(False).decoder, torch.randn(2, 70, 3, 4), sampling.Reader()
    exact = sampling.decode(fuse(half, torch.float16, WINOGRAD), z, reader)
    policy = Policy(dict.fromkeys(eligible(half), kind), reader.ranges()) if kind == "fp8" else Policy()
    network = fuse(half, torch.float16, WINOGRAD, Operands(torch.float16, policy, winograd=True))
    plans = (2, 0), (2, 0, Parking(None, 0, rows=64)), (1, 0, Parking(None, 0, streams=0))
    whole, *others = (decode(network, z, *plan) for plan in plans)
    assert all(torch.equal(whole, other) for other in others)
    assert kind == "fp16" or 20 < sampling.decibel(sampling.mse([sampling.decode(network, z)], [exact])) < 60


def test_layers_take_it_by_width_and_type(monkeypatch):
    monkeypatch.setattr(schedules, "WIDTH", 128)
    for dtype in (torch.float16, torch.bfloat16, FP8, torch.int8):
        for channels in (96, 128, 192, 640):
            taken = [n for n in (32, 64, 96, 128, 192, 384, 640) if schedules.takes(dtype, channels, n)]
            wider = [192, 384] if dtype.itemsize == 2 and channels >= 192 else []
            assert taken == sorted({*([128, 384, 640] if channels > 96 else []), *wider})
    assert not schedules.takes(torch.float32, 512, 512)


def test_published(monkeypatch, convolutions):
    """A published network runs in Winograd form if that is switched on."""
    monkeypatch.setattr(schedules, "WIDTH", 128)
    config = Published((128, 256, 512, 512), (128, 256, 512, 512))
    off, on = (FusedWalk(ARCHITECTURE, config, torch.float16, o) for o in (DEFAULTS, WINOGRAD))
    direct = ("conv_in", "downsamplers", "upsamplers", "shortcut", "conv_out")
    for half in ("decoder", "encoder"):
        assert not any(c.weight.winograd for c in convolutions(off.network(half)).values())
        for key, conv in convolutions(on.network(half)).items():
            assert conv.weight.winograd != any(name in key for name in direct)
    # Planes are twice a history's bytes, and not the whole of a plan.
    for half in ("decoder", "encoder"):
        direct, planes = (w.sizes(half, 1, 1, 90, 160, torch.float32).device for w in (off, on))
        assert direct < planes < 2 * direct
        parked = [w.sizes(half, 1, 1, 90, 160, torch.float32, parking=Parking(None, 384 << 20)).host for w in (off, on)]
        assert parked[0] == parked[1]


@pytest.mark.parametrize("name", ["hunyuanvideo", "hunyuanvideo1.5", "minimaxh3", "ltx"])
def test_other_borders(monkeypatch, name):
    """Published networks with other borders run in Winograd form, too."""
    monkeypatch.setattr(schedules, "WIDTH", 128)
    architecture = next(a for a in ARCHITECTURES if a.keys.name == name)
    walk = FusedWalk(architecture, architecture.published.config, torch.float16, WINOGRAD)
    for half in walk.halves:
        calls = walk.run(half, 45, 80).calls.values()
        assert sum(c.work for c in calls if c.weight.winograd) > 0.8 * sum(c.work for c in calls)


@torch.no_grad()
def test_continued_clip(build):
    """No plain history can be made of a ring's planes: under a plan that parks, the clip begins anew."""
    half, z = build(decoder(Group(4)), torch.float16), torch.randn(3, 5, 6, 8)
    network = fuse(half, torch.float16, WINOGRAD)

    def run(parking=None):
        made = network.plan(1, 5, 6, 2, torch.float32, CPU, parking)
        made.allocate()
        return made

    def step(made, part, out):
        with made.chunk():
            network.chunk(made, part, 2, torch.float32, lambda pixels: out.append(pixels.clone()))

    whole = decode(network, z, 3, 0)
    for parking in (None, Parking(None, 0)):
        first, second, other, out = run(parking), run(parking), run(None if parking else Parking(None, 0)), []
        step(first, z[:1], out)
        assert not take_over(other, hand_over(first))
        assert take_over(second, hand_over(first))
        step(second, z[1:2], out)
        step(second, z[2:], out)
        assert torch.equal(torch.cat(out), whole)
        # What runs then: the clip from its start, whose first frames are known already.
        clips = SimpleNamespace(batch=1, half=half, guard=SimpleNamespace(chunks=None))
        passing = FusedPass(network, clips, None, None, None)
        passing._run = other
        assert passing.begin(0, 0, hand_over(first)) == (0, 0)
        again = []
        for part in z.split(1):
            step(other, part, again)
        assert torch.equal(torch.cat(again), whole)
        for made in (first, second, other):
            made.free()


@torch.no_grad()
def test_calibration_sees_plain_values(build):
    half, z = build(decoder(Group(4)), torch.float16), torch.randn(2, 6, 5, 8)
    readers = sampling.Reader(), sampling.Reader()
    for options, reader in zip((DEFAULTS, WINOGRAD), readers, strict=True):
        sampling.decode(fuse(half, torch.float16, options), z, reader)
    direct, planes = (reader.ranges() for reader in readers)
    assert direct.keys() == planes.keys() and readers[0].flops == readers[1].flops
    for key, found in direct.items():
        # Three digits are kept, and roundings before it differ.
        assert found.level == pytest.approx(planes[key].level, rel=0.01)
        assert max(found.largest) == pytest.approx(max(planes[key].largest), rel=0.02)


@torch.no_grad()
def test_packed_planes_are_kept_and_found_again(build, tmp_path):
    half = build(decoder(Group(4)), torch.float16)
    keys, reader = eligible(half), sampling.Reader()
    sampling.decode(fuse(half, torch.float16), torch.randn(2, 4, 4, 8), reader)
    operands = Operands(torch.float16, Policy(dict.fromkeys(keys, "int8"), reader.ranges()), winograd=True)
    made = fuse(half, torch.float16, WINOGRAD, operands)
    prepared.save(made, tmp_path / "it.safetensors", "this")
    with torch.device("meta"):
        again = Operands(torch.float16, operands.policy, winograd=True)
        plan = fuse(build(decoder(Group(4)), torch.float16).to("meta"), torch.float16, WINOGRAD, again)
    found = prepared.load(plan, tmp_path / "it.safetensors", "this", CPU)
    z = torch.randn(2, 5, 4, 8)
    assert torch.equal(sampling.decode(found, z), sampling.decode(made, z))
