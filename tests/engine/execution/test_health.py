"""A NaN or Inf anywhere in a network: no precision hides it, and from its chunk on the run goes on in a wider type."""

import inspect

import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae import load
from zerowaste_vae.engine.execution.core import Core
from zerowaste_vae.engine.families import wan
from zerowaste_vae.engine.kernels.norm_act import statistics
from zerowaste_vae.engine.runtime.context import ExecutionContext

#: Per architecture and operation: convolutions that int8 is tried with; the other precisions take the first two.
KEYS = {
    ("seedvr2", "decode"): ("mid_block.resnets.1.conv2", "up_blocks.0.upsamplers.0.conv", "decoder.conv_in",
                            "mid_block.resnets.0.conv1", "up_blocks.0.resnets.2.conv2", "up_blocks.3.resnets.1.conv1"),
    ("seedvr2", "encode"): ("down_blocks.2.downsamplers.0.conv", "encoder.conv_out", "encoder.conv_in",
                            "down_blocks.3.resnets.1.conv2", "mid_block.resnets.1.conv2"),
    ("wan2.1", "decode"): ("upsamples.2.residual.6", "upsamples.11.resample.1", "decoder.conv1", "middle.0.residual.2",
                           "upsamples.10.residual.6", "upsamples.14.residual.6"),
    ("wan2.1", "encode"): ("downsamples.5.time_conv", "downsamples.1.residual.6", "middle.2.residual.6"),
}  # fmt: skip
CASES = [
    (arch, operation, precision, key, value)
    for (arch, operation), keys in KEYS.items()
    for precision in ("int8", "fp8", "fp16" if arch == "seedvr2" else "bf16")
    for key, value in zip(keys if precision == "int8" else keys[:2], 3 * [torch.inf, torch.nan], strict=False)
]


@pytest.fixture(scope="module", autouse=True)
def on_references(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
        patch.setenv("ZEROWASTE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def wan_file(tmp_path_factory, seed_model):
    model = wan.WAN21.build(wan.Config((32, 32, 32, 32), (32, 32, 32, 32)))
    seed_model(model, 3)
    path = tmp_path_factory.mktemp("wan") / "wan.safetensors"
    save_file(model.to(torch.bfloat16).state_dict(), path)
    return path


class Poison:
    """Puts `value` into one number of what a convolution makes in the second chunk, until a safer run begins."""

    def __init__(self, monkeypatch, key, value, call=2):
        self.key, self.value, self.call = key, value, call
        self.calls = self.struck = 0
        self.armed = True
        conv, product, safer = ExecutionContext.conv, ExecutionContext.product, Core._safer
        signature = inspect.signature(conv)

        def disarm(vae, where):
            self.armed = False
            return safer(vae, where)

        def after_conv(run, conv_, x, out, *args, **options):
            self.inside = True
            sums = conv(run, conv_, x, out, *args, **options)
            self.inside = False
            groups = signature.bind(run, conv_, x, out, *args, **options).arguments.get("groups", 0)
            return self.strike(run, conv_, out, sums, groups)

        def after_product(run, conv_, data, out, **options):
            """Convolutions that a step calls without ExecutionContext.conv."""
            sums = product(run, conv_, data, out, **options)
            return sums if self.inside else self.strike(run, conv_, out, sums, 0)

        self.inside = False
        monkeypatch.setattr(Core, "_safer", disarm)
        monkeypatch.setattr(ExecutionContext, "conv", after_conv)
        monkeypatch.setattr(ExecutionContext, "product", after_product)

    def strike(self, run, conv, out, sums, groups):
        if run.dry or not self.armed or not conv.key.endswith(self.key) or not out.shape[0]:
            return sums
        self.calls += 1
        if self.calls != self.call:
            return sums
        self.struck += 1
        out[-1, 1, 0, 3] = self.value
        return None if sums is None else statistics(out, groups)


@pytest.fixture(scope="module")
def runs(make_vae_file, wan_file):
    """(VAE, operation on a clip of three chunks, what it gives, what the safer run gives), by the first three names."""
    known = {}

    def get(arch, operation, precision):
        if (arch, operation, precision) not in known:
            path = wan_file if arch == "wan2.1" else make_vae_file((16, 16, 32, 32), (16, 16, 32, 32), 4, 6)
            g = torch.Generator().manual_seed(0)
            given = torch.randn(1, 16, 3, 2, 2, generator=g) if operation == "decode" else torch.rand(
                1, 9, 16, 16, 3, generator=g)  # fmt: skip
            vae = load(path, precision=precision, device="cpu")
            good = getattr(vae, operation)(given, chunk=1)
            safer = getattr(vae._safer(""), operation)(given, chunk=1)
            known[arch, operation, precision] = vae, given, good, safer
        return known[arch, operation, precision]

    return get


@pytest.mark.parametrize(("arch", "operation", "precision", "key", "value"), CASES)
def test_it_is_seen(runs, monkeypatch, arch, operation, precision, key, value):
    vae, given, good, safer = runs(arch, operation, precision)
    axis = 1 if operation == "decode" else 2
    assert not torch.equal(good, safer)
    # A clip's first frame passes by Wan's time_conv.
    poison = Poison(monkeypatch, key, value, 1 if key.endswith("time_conv") else 2)
    out = getattr(vae, operation)(given, chunk=1)
    assert poison.struck == 1
    assert vae.last_report.events["nan_reruns"] == 1
    assert torch.equal(out.narrow(axis, 0, 1), good.narrow(axis, 0, 1))
    assert torch.equal(out.narrow(axis, 1, out.shape[axis] - 1), safer.narrow(axis, 1, out.shape[axis] - 1))


@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_in_attention(runs, monkeypatch, what):
    """A softmax gives -Inf no weight: it must be seen before that."""
    vae, z, good, safer = runs("seedvr2", "decode", "int8")
    attempt, seen = ExecutionContext.attempt, []

    def poisoned(run, work, *args, **options):
        result = attempt(run, work, *args, **options)
        if work is torch.addmm and run.dtype == torch.float16:
            seen.append(what)
            if len(seen) == 5 + "qkv".index(what):  # the second chunk's only frame; the fourth product is the output's
                options["out"][0, 0] = -torch.inf
        return result

    monkeypatch.setattr(ExecutionContext, "attempt", poisoned)
    out = vae.decode(z, chunk=1)
    assert vae.last_report.events["nan_reruns"] == 1
    assert torch.equal(out[:, :1], good[:, :1])
    assert torch.equal(out[:, 1:], safer[:, 1:])


def test_in_the_front_of_blended_tiles(runs, monkeypatch):
    """Its features are finite again where the tiles begin, but wrong."""
    vae, z, *_ = runs("seedvr2", "decode", "int8")
    z = torch.cat((z, z.flip(3)), 3)
    options = {"tiling": "blended", "tile": 16, "overlap": 8, "chunk": 1}
    vae.decode(z, **options)  # ranges are known from now on
    safer = vae._safer("").decode(z, **options)
    assert Poison(monkeypatch, "mid_block.resnets.0.conv1", torch.inf, 1).armed
    out = vae.decode(z, **options)
    assert vae.last_report.events["nan_reruns"] == 1
    assert torch.equal(out, safer)
