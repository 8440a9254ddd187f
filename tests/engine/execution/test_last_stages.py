"""A NaN in anything that the last stages of any family read: no norm, product, store or clamp hides it."""

import contextlib
import dataclasses

import pytest
import torch
from zerowaste_vae.engine.execution.core import Core
from zerowaste_vae.engine.families import (
    ARCHITECTURES,
    cogvideox,
    cosmos,
    hunyuan,
    hunyuan15,
    hunyuan_image,
    hunyuan_refiner,
    kl,
    ltx,
    minimax_h3,
    mochi,
    qwen_image21,
    seedvr2,
    svd,
    tae,
    taehv,
    wan,
)
from zerowaste_vae.engine.families.mage.patchwise import LayerMoments, PatchPixels
from zerowaste_vae.engine.kernels.targets import triton_version
from zerowaste_vae.engine.kernels.to_pixels import to_pixels
from zerowaste_vae.engine.network.ops.ends import Moments, Pixels
from zerowaste_vae.engine.planning.fusable import half_not_fused, no_8_bit
from zerowaste_vae.engine.precision.modes import PRECISIONS
from zerowaste_vae.engine.runtime import context as run
from zerowaste_vae.engine.runtime.weights import Conv
from zerowaste_vae.engine.vae import VideoVAE

from ..families.small import SMALL

WIDTHS = (32, 32, 32, 32)
FIVE = (32, 32, 32, 32, 64)
STRIDES = (3, 2, 2), (2, 2, 2), (1, 2, 2)
BLOCKS = tuple(b for _ in range(3) for b in (ltx.Block(32, stride=ltx.STRIDES["all"]), ltx.Block(32, 1)))
LEVELS = (mochi.Level(32, 1), *(mochi.Level(32, 1, s) for s in STRIDES), mochi.Level(32, 1))
PICTURES = {"quantised": True, "resnets": (1, 1), "norm_groups": 4}
#: Small ones of every family whose widths the fused operators and 8 bit take.
CONFIGS = {
    "seedvr2": seedvr2.Config(WIDTHS, WIDTHS, norm_groups=4),
    "wan2.1": wan.Config(WIDTHS, WIDTHS),
    "wan2.2": wan.Config(WIDTHS, WIDTHS, 48, 2),
    "sd": kl.Config(WIDTHS, WIDTHS, 4, 4, **PICTURES),
    "flux": kl.Config(WIDTHS, WIDTHS, resnets=(1, 1), norm_groups=4),
    "flux2": kl.Config(WIDTHS, WIDTHS, 32, 32, **PICTURES),
    "ltx": ltx.Config(None, (ltx.Block(32, 1), *BLOCKS), 0, 32, latent_channels=16, decoder_border="zero"),
    "ltx-diffusion": SMALL["ltx-diffusion"],
    "mochi": mochi.Config(LEVELS, LEVELS, norm_groups=8),
    "cosmos": cosmos.Config((32, 32, 32), (32, 32, 32), 16),
    "hunyuanvideo": hunyuan.Config(WIDTHS, WIDTHS, norm_groups=4),
    "hunyuanvideo1.5": hunyuan15.Config(FIVE, FIVE[::-1], 16),
    "hunyuanimage": hunyuan_image.Config((*FIVE, 32), (*FIVE[::-1], 32), 16, norm_groups=8),
    "hunyuanimage-refiner": hunyuan_refiner.Config(FIVE, FIVE[::-1], 16, norm_groups=8),
    "cogvideox": cogvideox.Config(WIDTHS, WIDTHS, layers=1),
    "mage": SMALL["mage"],
    "qwenimage2.1": qwen_image21.Config((32, 32, 32, 64, 64), FIVE, 16),
    "minimaxh3": minimax_h3.Config((32, *WIDTHS, 32), 64, 2, 96),
    "svd": svd.Config(WIDTHS, WIDTHS, 4, 4, resnets=(1, 1), norm_groups=4),
    "taesd": tae.Config(WIDTHS, WIDTHS),
    "taef2": tae.Config(WIDTHS, WIDTHS, 32, pooled=True),
    "taesana": tae.Config((16, *WIDTHS), (*WIDTHS, 32, 32), deep=True),
    "taehv": taehv.Config(WIDTHS, WIDTHS),
}
#: Steps that may be the last one.
ENDS = Pixels, Moments, PatchPixels, LayerMoments
#: Last parameters of a network that only plain torch runs.
PARAMETERS = 4


def cases():
    for architecture in ARCHITECTURES:
        programs, native = architecture.programs(CONFIGS[architecture.name]), PRECISIONS[architecture.native]
        eight = () if no_8_bit(programs, native) else ("fp8",)
        for program in programs:
            # A CPU's own convolutions of 16 bit take seconds.
            for precision in ("fp32" if half_not_fused(program, native) else architecture.native, *eight):
                name = f"{architecture.name}-{program.half}-{precision}"
                yield pytest.param(architecture, program.half, precision, id=name)


class Seen(Exception):
    pass


class Kernels:
    """The fused walk on a CPU; in Triton's interpreter, if it is there, what reads `tensors` and what makes pixels."""

    def __init__(self, patch):
        self.tensors = ()
        patch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
        for name in ("coefficients", "norm_act", "conv3d", "to_pixels") if triton_version() else ():
            patch.setattr(run, name, self.where_it_matters(getattr(run, name)))

    def where_it_matters(self, operator):
        def call(*args, **options):
            told = options.get("epilogue")
            if told is None:
                reads = any(t is planted for t in held(args) for planted in self.tensors)
            else:  # the interpreter makes numbers of NaN in 8 bit
                reads = told.pixels is not None
            return operator(*args, **options, backend="triton" if reads or operator is to_pixels else "auto")

        return call


@pytest.fixture
def kernels(monkeypatch):
    def seen(*_):
        raise Seen

    monkeypatch.setattr(Core, "_safer", seen)
    return Kernels(monkeypatch)


def held(value):
    """Floating-point tensors in packed steps and in what operators are called with."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif dataclasses.is_dataclass(value):
        yield from held([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from held(item)


def parameters(value, name):
    """name -> tensors that hold a parameter. A convolution's weight may be packed in several forms, of which a call
    reads one."""
    if isinstance(value, Conv):
        own, packed = value.weight, getattr(value, "packed", None)
        yield f"{name} weight", [w.data for w in (own, *own.early)] + ([] if packed is None else [packed])
        yield f"{name} scale", [w.scale for w in (own, *own.early)]
        yield f"{name} bias", [value.bias]
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from parameters(getattr(value, field.name), f"{name}.{field.name}")
    else:
        yield from ((f"{name} {i}", [tensor]) for i, tensor in enumerate(held(value)))


def of_last_steps(vae, half):
    """Return what the last step of a component reads, in 8 bit its norm and those of the step before: packed if it
    runs fused, else the parameters."""
    if not vae._fused.packed_bytes(half):
        constants = {name for name, _ in vae.architecture.constants}
        every = [(name, [p]) for name, p in vae.model.named_parameters() if name not in constants]
        yield from [(name, p) for name, p in every if name.startswith(half)][-PARAMETERS:]
        return
    eight = vae._mixed.mode.kind is not None
    links = [link for stage in getattr(vae._fused, half)().stages for link in stage]
    ends = next(i for i, link in reversed(list(enumerate(links))) if isinstance(link.step, ENDS))
    for link in links[ends - eight :]:
        for name, tensors in parameters(link.packed, link.step.name):
            tensors = [t for t in tensors if t is not None and t.is_floating_point()]
            if tensors and (not eight or "norm" in name):
                yield name, tensors


@pytest.mark.parametrize(("architecture", "half", "precision"), list(cases()))
def test_it_is_seen(kernels, seed_model, architecture, half, precision):
    model = architecture.build(CONFIGS[architecture.name]).requires_grad_(False)
    seed_model(model, 3)
    kind = architecture.native if precision == "fp8" else precision
    dtype = PRECISIONS[kind]
    here = architecture.of(model.config), kind, dtype, torch.device("cpu")
    vae = VideoVAE(model.to(dtype), *here, asked=precision)
    g = torch.Generator().manual_seed(0)
    latent, video = torch.randn(1, vae.latent_channels, 1, 1, 2, generator=g), torch.rand(1, 1, 32, 32, 3, generator=g)

    def go():
        if half == "decoder":
            vae.decode(latent, output="uint8")
        else:
            vae.encode(video)

    go()
    if precision == "fp8":  # whose ranges are known from now on
        go()
    assert vae.precision == precision
    found, missed = list(of_last_steps(vae, half)), []
    for name, tensors in found:
        places = [(t, tuple(n // 2 for n in t.shape)) for t in tensors]
        kept = [t[at].clone() for t, at in places]
        for t, at in places:
            t[at] = torch.nan
        kernels.tensors = tensors
        with contextlib.suppress(Seen):
            go()
            missed.append(name)
        kernels.tensors = ()
        for (t, at), value in zip(places, kept, strict=True):
            t[at] = value
    assert found
    assert not missed
