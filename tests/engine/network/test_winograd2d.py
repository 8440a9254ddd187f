"""The Winograd form in a network: chosen by layer and card, the same bits in every plan, on the buffers of
the direct form."""

from dataclasses import dataclass, replace

import pytest
import torch
from zerowaste_vae.engine.extras.eight_bit import sampling
from zerowaste_vae.engine.extras.tuning.layers import layers
from zerowaste_vae.engine.families import by_name
from zerowaste_vae.engine.kernels import targets
from zerowaste_vae.engine.kernels.gpus import GPUS
from zerowaste_vae.engine.kernels.targets import prebuilt, projected, under
from zerowaste_vae.engine.network import packed
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.network.ops.conv import Conv
from zerowaste_vae.engine.network.ops.ends import Pixels
from zerowaste_vae.engine.network.ops.norm import Group, Length
from zerowaste_vae.engine.network.ops.resnet import Res
from zerowaste_vae.engine.network.ops.shortcut import ShortcutUp
from zerowaste_vae.engine.network.program import STEP, TILES, Program
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.fused_walk import FusedWalk
from zerowaste_vae.engine.planning.launches import uniform
from zerowaste_vae.engine.precision.forms import Operands
from zerowaste_vae.engine.precision.modes import PRECISIONS
from zerowaste_vae.engine.precision.policy import Policy, eligible
from zerowaste_vae.engine.runtime.handover import hand_over, take_over
from zerowaste_vae.engine.runtime.parking import Parking

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
    (torch.float16, Length(), {"border": "reflect", "head": "zero"}, 55),
], ids=["float16", "bfloat16", "reflected"])  # fmt: skip
@torch.no_grad()
def test_every_plan_has_the_same_bits(build, convolutions, exact_sums, dtype, norm, style, least):
    """Two bands of rows, an odd width, rings and parked bands; near the direct form."""
    half, z = build(decoder(norm, **style), dtype), torch.randn(5, 34, 3, 8)
    direct = fuse(half, dtype, DEFAULTS)
    network = fuse(half, dtype, WINOGRAD, Operands(dtype, winograd=True))
    formed = {key for key, conv in convolutions(network).items() if conv.weight.tiles}
    assert formed == {"decoder.grow.conv", *(f"decoder.{n}.0.conv{i}" for n in ("deep", "wide") for i in (1, 2))}
    whole, *others = (decode(network, z, *plan) for plan in PLANS)
    assert all(torch.equal(whole, other) for other in others)
    assert least < sampling.decibel(sampling.mse([whole], [decode(direct, z, 5, 0)])) < 120


@torch.no_grad()
def test_heavy_layers_at_the_latents_size_stay_direct(build, convolutions, exact_sums, monkeypatch):
    """The layer's place in the network decides, and no plan: those of as many weights on larger frames have the
    form."""
    monkeypatch.setattr(packed, "HEAVY", 64 * 64 * 27)
    half, z = build(decoder(Group(4)), torch.float16), torch.randn(5, 34, 3, 8)
    network = fuse(half, torch.float16, WINOGRAD)
    formed = {key for key, conv in convolutions(network).items() if conv.weight.tiles}
    assert formed == {"decoder.wide.0.conv1", "decoder.wide.0.conv2"}
    whole, *others = (decode(network, z, *plan) for plan in PLANS[:4])
    assert all(torch.equal(whole, other) for other in others)
    monkeypatch.setattr(packed, "HEAVY", 64 * 64 * 27 + 1)
    assert fuse(half, torch.float16, WINOGRAD).formed[0] == 5


def test_the_first_convolution_is_direct(build, convolutions):
    """What it rounds goes through all others; it reads the latent, wide as it may be."""
    half = build(Program.of("decoder", 64, Conv("enter", 64, 64), Res("deep.0", 64, 64, Group(4)), TILES,
                            ShortcutUp("grow", 64, 64, temporal=True), STEP, Pixels("n", "c", 64, Group(4))),
                 torch.float16)  # fmt: skip
    found = {key: conv.weight.tiles for key, conv in convolutions(fuse(half, torch.float16, WINOGRAD)).items()}
    assert not found.pop("decoder.enter") and sum(found.values()) == 3


@pytest.mark.parametrize(("name", "share"), [("hunyuanvideo1.5", 0.055), ("wan2.2", 0.045)])
def test_published_heavy_layers(convolutions, name, share):
    """Few of the products, and more than half of the weights that would take the form. An encoder ends at the latent's
    size; Wan 2.2's has 640 channels there, which are not so many weights."""
    one = by_name(name)
    dtype = PRECISIONS[one.native]
    direct, tiled = (FusedWalk(one, one.published.config, dtype, options) for options in (DEFAULTS, WINOGRAD))
    for half, formed in (("decoder", False), ("encoder", name == "wan2.2")):
        convs = convolutions(tiled.network(half)).items()
        middle = {conv.weight.tiles for key, conv in convs if ".mid" in key and conv.weight.kernel == (3, 3, 3)}
        assert middle == {formed} and any(conv.weight.tiles for _, conv in convs)
    calls = tiled.run("decoder", 45, 80).calls.values()
    suits = [c for c in calls if c.weight.kernel[1:] == (3, 3) and c.weight.channels >= 128]
    stays = [c for c in suits if not c.weight.tiles]
    assert 0 < sum(c.work for c in stays) < share * sum(c.work for c in suits)
    weights = [walk.network("decoder").nbytes for walk in (direct, tiled)]
    assert weights[1] < 1.35 * weights[0]


@torch.no_grad()
def test_a_clip_goes_on_in_another_plan(build, exact_sums):
    """Histories are those of the direct form: rings and parked bands continue each other's clip, and a direct one's."""
    half, z = build(decoder(Group(4)), torch.float16), torch.randn(3, 5, 6, 8)
    network = fuse(half, torch.float16, WINOGRAD)
    whole, out = decode(network, z, 3, 0), []
    runs = [network.plan(1, 5, 6, 2, torch.float32, CPU, parking) for parking in (None, Parking(None, 0), None)]
    for i, run in enumerate(runs):
        run.allocate()
        if i:
            take_over(run, hand_over(runs[i - 1]))
        with run.chunk():
            network.chunk(run, z[i : i + 1], 2, torch.float32, lambda pixels: out.append(pixels.clone()), i == 2)
    for run in runs:
        run.free()
    assert torch.equal(torch.cat(out), whole)


@torch.no_grad()
def test_layers_without_such_kernels(build, convolutions):
    """Those in 8 bit, whose products are summed in fp16, or whose results may have another type."""
    half = build(Program.of("decoder", 8, Conv("enter", 8, 128), Res("deep.0", 128, 128, Group(4)), TILES,
                            Res("wide.0", 128, 128, Group(4)), Pixels("n", "c", 128, Group(4))),
                 torch.float16)  # fmt: skip
    eighth = Policy(dict.fromkeys([key for key in eligible(half) if "deep" in key], "fp8"), {})
    some = {f"decoder.wide.0.conv{i}" for i in (1, 2)}
    for policy, formed in ((eighth, some), (Policy(half_accumulate=True), set())):
        network = fuse(half, torch.float16, WINOGRAD, Operands(torch.float16, policy, winograd=True))
        found = convolutions(network)
        assert {key for key, conv in found.items() if conv.weight.tiles} == formed
        assert network.formed == (len(formed), len(found))


@pytest.mark.parametrize(("name", "dtype"), [("seedvr2", torch.float16), ("wan2.1", torch.bfloat16)])
def test_published(convolutions, name, dtype):
    """Most work of a published network has this form where it is on, and plans state the memory of the
    direct form, with at most 16/9 of the weights."""
    one = by_name(name)
    direct, tiled = (FusedWalk(one, one.published.config, dtype, options) for options in (DEFAULTS, WINOGRAD))
    for half in ("decoder", "encoder"):
        assert not any(c.weight.tiles for c in convolutions(direct.network(half)).values())
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
    kinds = [layer.kind for layer in layers(walk, here)]
    assert kinds and not any(k.channels == k.outputs and k.phases == 1 and not k.strided for k in kinds)


@pytest.mark.parametrize(("name", "precision", "kind", "word"), [
    ("seedvr2", torch.float16, Policy(), None), ("seedvr2", torch.float16, Policy(half_accumulate=True), "in fp16"),
    ("seedvr2", torch.float16, Policy({"decoder.mid_block.resnets.0.conv1": "fp8"}), None),
    ("seedvr2", torch.float16, "fp8", "in 8 bit"),
    ("ltx", torch.bfloat16, Policy(), None), ("cogvideox", torch.bfloat16, Policy(), "was not measured"),
], ids=["fp16", "fp16_fast", "one in fp8", "fp8", "ltx", "cogvideox"])  # fmt: skip
def test_why_a_component_has_none(name, precision, kind, word):
    one = by_name(name)
    walk = FusedWalk(one, one.published.config, precision, WINOGRAD)
    if not isinstance(kind, Policy):
        kind = uniform(one.program("decoder", one.published.config), kind)
    walk.use("decoder", kind)
    why = walk.no_winograd("decoder")
    assert why is None if word is None else word in why


#: Cards by name -> whether layers have the form by default.
CARDS = {
    **{gpu.name: gpu.rates in ("geforce", "full") for gpu in GPUS}, "NVIDIA GeForce RTX 5070 Ti": True,
    "NVIDIA GeForce RTX 4070 Laptop GPU": True, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": True,
    "NVIDIA H100 80GB HBM3": False, "NVIDIA A100-SXM4-80GB": False, "NVIDIA GH200 480GB": False, "NVIDIA B200": False,
    "NVIDIA GB10": True, "NVIDIA RTX A6000": True, "sm_86": True, "sm_90": False, "sm_120": True,
}  # fmt: skip
_SM = {"A100-SXM4": 80, "A6000": 86, "sm_86": 86, "Laptop": 89, "H100": 90, "GH200": 90, "sm_90": 90, "B200": 100,
       "GB10": 121}  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
def test_cards(name, monkeypatch):
    """By its row or, without one, its generation: the same for every way of launching kernels. The option decides
    where it is given, and what the driver refused is off in any case."""
    row = next((gpu.sm for gpu in GPUS if gpu.name == name), None)
    sm = row or next((sm for word, sm in _SM.items() if word in name), 120)
    monkeypatch.setattr(targets, "triton_version", lambda: (3, 6))
    for here in projected(name, sm)[:-1]:
        assert DEFAULTS.decided(here).winograd == CARDS[name], here.way
        assert WINOGRAD.decided(here).winograd and not DEFAULTS.switched(off=["winograd"]).decided(here).winograd
        refused = replace(here, winograd_off="refused")
        assert not DEFAULTS.decided(refused).winograd and not WINOGRAD.decided(refused).winograd
    assert not DEFAULTS.decided(projected(name, sm, "plain")[-1]).winograd


def test_a_data_centre_card_keeps_its_form_under_a_set():
    """An H200 without Triton runs code of RTX 50, and is no RTX 50."""
    assert not DEFAULTS.decided(under("C", "NVIDIA H200", 90)).winograd
