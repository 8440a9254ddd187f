"""MiniMax H3's VAE: against recorded outputs of the original, its published sizes, and plans of those."""

import gc
import weakref

import pytest
import torch
from safetensors.torch import load_file
from zerowaste_vae import load
from zerowaste_vae.engine.checkpoints import read_checkpoint
from zerowaste_vae.engine.errors import InputError, PlanError
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import by_file, detect
from zerowaste_vae.engine.families.minimax_h3 import ARCHITECTURE
from zerowaste_vae.engine.kernels.tokens import rounded
from zerowaste_vae.engine.network.codes import Codes
from zerowaste_vae.engine.network.products import Product
from zerowaste_vae.engine.network.products import product as multiply
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.budget import Limits
from zerowaste_vae.engine.planning.make import make_planner
from zerowaste_vae.engine.planning.plain_walk import Torch
from zerowaste_vae.engine.precision.modes import PRECISIONS, Mode
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.system.memory import GIB

from .originals import close

PUBLISHED, CPU = ARCHITECTURE.published.config, torch.device("cpu")


@pytest.fixture(scope="module")
def golden(shared):
    """(VAE of the recorded weights, recorded tensors)"""
    folder = shared / "golden" / "minimax_h3"
    vae = load(folder / "minimax_h3.weights.safetensors", device="cpu")
    return vae, load_file(folder / "minimax_h3.io.safetensors")


@pytest.mark.parametrize("name", ["T1", "T2", "T2tiles", "T7", "T12"])
def test_decodes_are_the_originals(golden, name):
    vae, tensors = golden
    made = vae.decode(tensors[f"{name}.latent"], native_blend="separate")
    close(made.movedim(-1, 1), tensors[f"{name}.decode"])
    assert "own" in vae.last_report.plan and vae.last_report.mode.startswith("a transformer")


@pytest.mark.parametrize("name", ["T1", "T1long"])
def test_tiles_blend_by_either_rule(golden, shared, name):
    """Where overlaps cross: with neighbours as they are in the picture, as ComfyUI does now, or as they came. Recorded
    in fp16."""
    vae, _ = golden
    tensors = load_file(shared / "golden" / "minimax_h3_blend" / "minimax_h3_blend.io.safetensors")
    rules = {"assembled": "decode", "separate": "decode_0.33.0"}
    for rule, recorded in rules.items():
        made = vae.decode(tensors[f"{name}.latent"], native_blend=rule).movedim(-1, 1)
        assert f"({rule} blend)" in vae.last_report.plan
        assert (made - tensors[f"{name}.{recorded}"].float()).abs().max() < 2.6e-4
        other = tensors[f"{name}.{(set(rules.values()) - {recorded}).pop()}"].float()
        assert (made - other).abs().max() > 0.01
    assert torch.equal(vae.decode_raw(tensors[f"{name}.latent"]), vae.decode(tensors[f"{name}.latent"]).movedim(-1, 1))
    with pytest.raises(InputError, match="native_blend='both' is not one of assembled, separate"):
        vae.plan_decode(1, 18, 20, native_blend="both")


def test_other_families_have_no_native_tiles(vae):
    with pytest.raises(InputError, match="native_blend is for VAEs that tile themselves"):
        vae.plan_decode(1, 8, 8, native_blend="separate")


@pytest.mark.parametrize("name", ["F1", "F5tiles", "F22", "F39"])
def test_encodes_are_the_originals(golden, name):
    vae, tensors = golden
    moments = vae.encode_raw(tensors[f"{name}.pixels"])
    close(vae.model.sample(moments), tensors[f"{name}.latent_out"])


@pytest.mark.parametrize(("name", "layers"), [("narrow", 1), ("deep", 3)])
def test_int8_file(shared, name, layers):
    """As ComfyUI dequantises them: to fp16, then computed in fp32."""
    folder = shared / "golden" / "minimax_h3_int8"
    vae = load(folder / f"{name}.weights.safetensors", device="cpu")
    assert vae.model.config.layers == layers
    tensors = load_file(folder / f"{name}.io.safetensors")
    cases = [case.removesuffix(".decode") for case in tensors if case.endswith(".decode")]
    assert len(cases) == (4 if name == "narrow" else 2)
    for case in cases:
        close(vae.decode_raw(tensors[f"{case}.latent"]), tensors[f"{case}.decode"])


def decibel(a: torch.Tensor, b: torch.Tensor) -> float:
    """PSNR of pictures in 0..1."""
    return float(-10 * (a.float() - b.float()).square().mean().log10())


@pytest.fixture(params=["narrow", "deep"])
def int8(request, shared, monkeypatch):
    """(VAE of an int8 file that multiplies its codes, in fp32 between products; recorded tensors)"""
    monkeypatch.setitem(PRECISIONS, "fp16", torch.float32)
    folder = shared / "golden" / "minimax_h3_int8"
    vae = load(folder / f"{request.param}.weights.safetensors", "int8", "cpu")
    return vae, load_file(folder / f"{request.param}.io.safetensors")


@pytest.mark.parametrize("name", ["attn.to_qkv", "ff.w2"])
def test_int8_products(int8, name):
    """Inputs of a product as ComfyUI rotates and rounds them, and its results; a column is an outlier."""
    vae, tensors = int8
    product = Product.of(vae.model.decoder.get_submodule(f"transformer_blocks.0.{name}"), "int8", torch.float32, CPU)
    x, expected = tensors[f"{name}.x"], tensors[f"{name}.y"]
    codes, scales = torch.empty_like(x, dtype=torch.int8), torch.empty(len(x))
    out = torch.empty_like(expected)
    rounded(x, codes, scales, turn=product.turn)
    assert torch.equal(codes, tensors[f"{name}.x_int8"])
    torch.testing.assert_close(scales[:, None], tensors[f"{name}.x_scale"], rtol=1e-6, atol=0)
    multiply(product, codes, out, scales, torch.empty(out.numel(), dtype=torch.int32))
    torch.testing.assert_close(out, expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize(("precision", "weights_on", "kept"), [
    ("int8", None, True), ("fp16", None, False), ("fp8", None, False), ("fp32", None, False), ("fp32", "cpu", True),
])  # fmt: skip
def test_codes_stay_only_where_they_may_be_multiplied(shared, precision, weights_on, kept):
    """They would be 2.4 GB of the published file beside 4.8 of floats."""
    checkpoint = read_checkpoint(shared / "golden" / "minimax_h3_int8" / "narrow.weights.safetensors")
    held = [weakref.ref(codes.values) for codes in checkpoint.codes.values()]
    vae = load(checkpoint, precision, "cpu", weights_on=weights_on)
    del checkpoint
    gc.collect()
    layer = vae.model.decoder.get_submodule("transformer_blocks.0.ff.w2")
    assert len(held) == 4 and (Codes.of(layer) is not None) == kept
    assert all((ref() is not None) == kept for ref in held)


def test_int8_decodes(int8):
    """As ComfyUI's int8 path, and no further from the dequantised network than that."""
    vae, tensors = int8
    assert vae.precision == "int8"
    for case in [case.removesuffix(".int8") for case in tensors if case.startswith("T") and case.endswith(".int8")]:
        made = vae.decode_raw(tensors[f"{case}.latent"])
        theirs, exact = tensors[f"{case}.int8"], tensors[f"{case}.decode"]
        assert decibel(made, theirs) > 70  # rounding to whole numbers tells of the last bits
        assert decibel(made, exact) > decibel(theirs, exact) - 0.5


def test_int8_codes_go_with_changed_weights(int8):
    vae, tensors = int8
    layer = vae.model.decoder.get_submodule("transformer_blocks.0.ff.w2")
    assert Codes.of(layer) is not None
    before = vae.decode_raw(tensors["T1.latent"])
    with torch.no_grad():
        layer.weight.mul_(1.5)
    assert Codes.of(layer) is None
    assert not torch.equal(vae.decode_raw(tensors["T1.latent"]), before)
    assert Product.of(layer, "int8", torch.float32, CPU).turn == 0


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_codes_come_back_with_their_weights(shared, kind):
    """A patch that is laid over weights and taken away, and other tensors with the same values."""
    path = shared / "golden" / "minimax_h3_int8" / "narrow.weights.safetensors"
    vae = load(path, "int8", "cpu")
    vae.model.to(kind)  # as fp16 and bf16 VAEs hold them
    layers = [vae.model.decoder.get_submodule(f"transformer_blocks.0.{name}") for name in ("ff.w2", "attn.to_qkv")]
    kept = [layer.weight.clone() for layer in layers]
    vae.follow()
    for layer in layers:
        layer.weight = torch.nn.Parameter(1.01 * layer.weight, requires_grad=False)
    vae.follow()
    assert [Codes.of(layer) for layer in layers] == [None, None]
    for layer, weight in zip(layers, kept, strict=True):
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert [Codes.of(layer) for layer in layers] == [None, None]
    vae.follow()
    assert all(Codes.of(layer) is not None for layer in layers)
    with torch.no_grad():
        layers[0].weight[-1, -1] += 0.25
    vae.follow()
    assert Codes.of(layers[0]) is None and Codes.of(layers[1]) is not None


def test_published_widths_and_names():
    with torch.device("meta"):
        model = ARCHITECTURE.build(PUBLISHED)
    state = model.state_dict()
    assert sum(p.numel() for p in model.parameters()) == 2_603_871_080
    assert detect(state) is ARCHITECTURE
    assert ARCHITECTURE.config_of({k: tuple(v.shape) for k, v in state.items()}, {}) == PUBLISHED
    assert by_file("minimax_h3_video_vae_fp16.safetensors") is ARCHITECTURE
    assert by_file("minimax_h3_audio_vae.safetensors") is None and by_file("taeminimax_h3.safetensors") is None


def test_random_weights(shared):
    """Random weights are drawn as the recorded ones."""
    recorded = load_file(shared / "golden" / "minimax_h3" / "minimax_h3.weights.safetensors")
    config = ARCHITECTURE.config_of({k: tuple(v.shape) for k, v in recorded.items()}, {})
    drawn = random_checkpoint(config, 5001, ARCHITECTURE).tensors
    assert drawn.keys() == recorded.keys()
    for name, values in recorded.items():
        if name in ARCHITECTURE.wide:  # written with four digits
            assert torch.allclose(drawn[name], values, rtol=0, atol=6e-5), name
        else:
            assert torch.equal(drawn[name], values), name


def test_statistics_stay_in_fp32(shared):
    vae = load(shared / "golden" / "minimax_h3" / "minimax_h3.weights.safetensors", precision="fp16", device="cpu")
    assert vae.model.latents_mean.dtype == vae.model.latents_std.dtype == torch.float32
    assert vae.model.decoder.x_embedder.weight.dtype == torch.float16


# -- plans of the published network ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planner():
    return lambda kind=None: make_planner(
        ARCHITECTURE, PUBLISHED, torch.float16, DEFAULTS, Mode(kind), lambda: True, Torch
    )


#: 1344x768, 90 frames.
SIZE = 27, 48, 84


def test_plans_keep_targets_by_streaming_weights(planner):
    peaks = []
    for gb in (16, 8, 6, 4, 3):
        limits = Limits(gb * GIB, host=64 * GIB)
        plan = planner().plan("decoder", SIZE, limits=limits)
        assert plan.peak_bytes <= limits.target and plan.own.grid == (4, 7) and plan.own.layers == 36
        peaks.append((plan.own.resident, plan.own.tiles))
    assert [p for p in peaks if p[0] == 36] == [(36, 4), (36, 4), (36, 4)]
    (four, many), (three, fewer) = peaks[3:]
    assert 0 <= three < four < 36 and many == fewer == 32
    eight = planner("fp8").plan("decoder", SIZE, limits=Limits(4 * GIB, host=64 * GIB))
    assert eight.own.resident == 36
    assert planner("int8").plan("decoder", SIZE, limits=Limits(2 * GIB, host=64 * GIB)).host_bytes > 0


def test_plans_that_cannot_be_say_so(planner):
    with pytest.raises(PlanError, match="1344x768 in its own tiles needs"):
        planner().plan("decoder", SIZE, limits=Limits(GIB // 2, host=64 * GIB))
    raised = planner().plan("decoder", SIZE, limits=Limits(GIB // 2, 8 * GIB, 64 * GIB))
    assert raised.raised == 8 * GIB and "raised" in raised.note
    with pytest.raises(PlanError, match="own tiles"):  # a CPU has nowhere else to keep them
        planner().plan("decoder", SIZE, limits=Limits(4 * GIB, host=0))


def test_tiles_that_are_asked_for_are_not_used(planner, monkeypatch):
    told = []
    monkeypatch.setattr("zerowaste_vae.engine.planning.planner.log.once", told.append)
    for request in (Request(), Request("blended", 256), Request("exact", 512), Request(chunk=2)):
        plan = planner().plan("decoder", SIZE, request, Limits(16 * GIB, host=0))
        assert plan.own.grid == (4, 7) and not plan.tiled
    assert len(told) == 3 and "part of the model" in told[0]


def test_encodes_are_planned(planner):
    plan = planner().plan("encoder", SIZE, limits=Limits(4 * GIB, host=64 * GIB))
    assert plan.fused and plan.own.tiles == 1 and plan.peak_bytes <= 4 * GIB
    lean = planner().plan("encoder", SIZE, limits=Limits(int(1.9 * GIB), host=64 * GIB))
    assert 0 < lean.steps.frames < 17
