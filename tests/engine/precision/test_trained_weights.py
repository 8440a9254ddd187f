"""Types and forms of convolutions judged on trained weights: those of TAEF2's decoder, with a latent that its encoder
makes of a frame of the demo clip, beside random weights of the same sizes.

This tells of 3x3 convolutions of 64 channels behind ReLU, without norms: nothing of convolutions in time, of norms or
of attention. `pytest -s` prints the table."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from zerowaste_vae import Checkpoint, load
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.extras.media.clips import read_video
from zerowaste_vae.engine.families.tae import TAEF2
from zerowaste_vae.engine.kernels.conv3d import Epilogue, conv3d, pack_tiles, pack_weight
from zerowaste_vae.engine.kernels.norm_act import Norm, Store, norm_act
from zerowaste_vae.engine.kernels.targets import FP8
from zerowaste_vae.engine.loader import demo_clip_path
from zerowaste_vae.engine.network.ops.conv import FrameConv

from ...conftest import FIXTURES

HALF, LARGEST = torch.float16, {torch.int8: 127.0, FP8: 448.0}
#: Name -> (how its weight is packed, type of the operands).
FORMS = {
    "fp16": (pack_weight, HALF), "bf16": (pack_weight, torch.bfloat16),
    "int8": (pack_weight, torch.int8), "fp8": (pack_weight, FP8),
    "Winograd, fp16": (pack_tiles, HALF),
}  # fmt: skip


@functools.cache
def layers(kind):
    """[(input [1, H, W, 64], convolution)] of all square ones of the decoder, for "trained" or "random" weights."""
    trained = {f"{h}.{n}": t for h in ("encoder", "decoder")
               for n, t in load_file(FIXTURES / "taef2" / f"taef2_{h}.safetensors").items()}  # fmt: skip
    vae = load(Checkpoint(trained, {}), "fp32", "cpu")
    frame = read_video(demo_clip_path(), 1)[0][:, :96, :128].float() / 255
    z = vae.model.packing.unpack(vae.encode(frame))
    if kind == "random":
        vae, z = load(random_checkpoint(architecture=TAEF2), "fp32", "cpu"), torch.randn(z.shape, generator=seeded())
    seen, hooks = [], []
    for module in vae.model.decoder.modules():
        if isinstance(module, FrameConv) and module.kernel_size == (3, 3) and module.weight.shape[:2] == (64, 64):
            hooks.append(module.register_forward_hook(
                lambda conv, given, _: seen.append((given[0][0, :, 0].permute(1, 2, 0)[None].contiguous(), conv))))
    with torch.no_grad():
        vae.model.decoder(z)
    return seen


def seeded():
    return torch.Generator().manual_seed(0)


def decibel(made, exact):
    return float(10 * (exact.square().mean() / (made - exact).square().mean()).log10())


def quality(form, x, conv):
    """dB of one convolution in a form against fp32, of the same input."""
    pack, dtype = FORMS[form]
    weight = conv.weight.detach()
    exact = F.conv2d(x.permute(0, 3, 1, 2), weight, padding=1).permute(0, 2, 3, 1)
    scale = float(x.abs().max()) / LARGEST[dtype] if dtype in LARGEST else 1.0
    height, width = x.shape[1:3]
    buffer = torch.zeros(1, height + 2, width + 2, 64, dtype=dtype)
    wide = x.to(torch.bfloat16 if dtype == torch.bfloat16 else HALF)
    norm_act(wide, Norm("none"), buffer, store=Store(silu=False, scale=scale))
    out = torch.zeros(x.shape, dtype=wide.dtype)
    epilogue = Epilogue(torch.zeros(64), scale=scale)
    conv3d(buffer, pack(weight[:, :, None], dtype), out, epilogue=epilogue, backend="reference")
    return decibel(out.float(), exact)


@pytest.fixture(scope="module")
def table():
    """(form, kind of weights) -> (least, mean, most) dB of the layers"""
    made = {}
    for form, kind in itertools.product(FORMS, ("trained", "random")):
        db = [quality(form, *layer) for layer in layers(kind)]
        assert len(db) == 33
        made[form, kind] = min(db), sum(db) / len(db), max(db)
        print(f"{form:28} {kind:8} {min(db):6.1f} {sum(db) / len(db):6.1f} {max(db):6.1f} dB")
    return made


#: Measured on a CPU, 29 November 2026; a form that loses more has lost something.
MEANS = {
    "fp16": (71.6, 70.6), "bf16": (52.2, 50.8), "int8": (36.4, 38.3), "fp8": (31.3, 28.4),
    "Winograd, fp16": (67.0, 66.0),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_keep_trained_weights_as_near_as_they_did(table, form):
    for kind, mean in zip(("trained", "random"), MEANS[form], strict=True):
        assert table[form, kind][1] > mean - 1.0, (form, kind)


def test_random_weights_tell_of_the_mean_and_not_of_the_worst_layer(table):
    """What random weights show of a type is within 3 dB of trained ones on average; in int8 the worst trained layer is
    far below all random ones."""
    for form in FORMS:
        assert abs(table[form, "trained"][1] - table[form, "random"][1]) < 3.0, form
    assert table["int8", "trained"][0] < table["int8", "random"][0] - 6.0
    assert table["Winograd, fp16", "trained"][0] > table["bf16", "trained"][2]  # far above what bf16 keeps
