"""Wan in 8 bit through the reference operators: which convolutions, how good, the same bits in every chunking, and the
VAE object around it."""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from zerowaste_vae.engine import load, loader
from zerowaste_vae.engine.extras.bench.calibrate import calibrate
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.eight_bit import sampling
from zerowaste_vae.engine.families import wan
from zerowaste_vae.engine.kernels.conv3d import reference
from zerowaste_vae.engine.kernels.targets import prebuilt
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.options import Options
from zerowaste_vae.engine.precision.forms import Operands
from zerowaste_vae.engine.precision.policy import Policy, eligible
from zerowaste_vae.engine.runtime import context as fused_run
from zerowaste_vae.engine.runtime.parking import Parking

CPU = torch.device("cpu")
BF16 = torch.bfloat16
CONFIGS = {
    "2.1": wan.Config((32, 32, 48, 48), (32, 64, 64, 64)),
    "2.2": wan.Config((32, 32, 64, 64), (32, 32, 64, 64), 48, 2),
}
SIZES = {"2.1": (16, 3, 4), "2.2": (48, 2, 3)}
#: Resnet convolutions and upsamplers of the decoder; resnet convolutions of the encoder.
COUNTS = {"2.1": (31, 20), "2.2": (31, 20)}


@pytest.fixture(scope="module", params=["2.1", "2.2"])
def network(request, seed_model):
    model = wan.WAN21.build(CONFIGS[request.param]).requires_grad_(False)
    seed_model(model, 3)
    return request.param, model.to(BF16)


@pytest.fixture(scope="module")
def samples(network):
    version, model = network
    c, h, w = SIZES[version]
    g = torch.Generator().manual_seed(2)
    side = 16 * model.config.patch
    return torch.randn(2, h, w, c, generator=g), torch.rand(5, side, 2 * side, 3, generator=g) * 2 - 1


@pytest.fixture(scope="module")
def ranges(network, samples):
    model, reader = network[1], sampling.Reader()
    sampling.decode(fuse(model.decoder, BF16), samples[0], reader)
    sampling.encode(fuse(model.encoder, BF16), samples[1], reader)
    return reader.ranges()


def mixed(model, half, kind, ranges):
    module = getattr(model, half)
    return fuse(module, BF16, operands=Operands(BF16, Policy(dict.fromkeys(eligible(module), kind), ranges)))


def test_eligible(network):
    """Eligible are the convolutions of blocks and upsamplers."""
    version, model = network
    decoder, encoder = eligible(model.decoder), eligible(model.encoder)
    assert (len(decoder), len(encoder)) == COUNTS[version]
    ups = [k for k in decoder if "resample" in k]
    assert len(ups) == 3
    keys = (*decoder, *encoder)
    assert not any(word in k for k in keys for word in ("time_conv", "shortcut", "head", "coder.conv1"))
    assert not any("resample" in k for k in encoder)
    assert all("residual" in k or k in ups for k in keys)


def test_work(network, samples):
    """Work is counted, and little of it stays in 16 bit."""
    model, reader = network[1], sampling.Reader()
    sampling.decode(fuse(model.decoder, BF16), samples[0], reader)
    plain = sampling.Reader()
    sampling.decode(fuse(model.decoder, BF16, Options(composed_upsample=False)), samples[0], plain)
    composed = [c.key for c in model.decoder.modules() if getattr(c, "key", "").endswith("resample.1")]
    for key in composed:  # 4 taps instead of 9 per output
        assert reader.flops[key] * 9 == plain.flops[key] * 4
    normed = set(eligible(model.decoder)) - set(composed)
    assert all(reader.flops[k] == plain.flops[k] for k in normed)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_loss(network, ranges, samples, kind):
    """8 bit changes results by as much as expected."""
    model, (z, video) = network[1], samples
    saturation = sampling.Saturation()
    decoders = fuse(model.decoder, BF16), mixed(model, "decoder", kind, ranges)
    pixels = [sampling.decode(n, z, saturation) for n in decoders]
    assert 20 < sampling.decibel(sampling.mse(pixels[:1], pixels[1:])) < 60
    assert saturation.total > 0
    assert saturation.count < 1e-3 * saturation.total
    latents = [sampling.encode(n, video) for n in (fuse(model.encoder, BF16), mixed(model, "encoder", kind, ranges))]
    noise = (latents[1] - latents[0]).square().mean() / latents[0].square().mean()
    assert 1e-6 < noise < 3e-2


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_buffers(network, ranges, samples, kind, monkeypatch):
    """By norms, by copies, and by the doubling of frames for the upsampler behind it."""
    model, read, made = network[1], [], []

    def convolving(x, weight, out, **options):
        read.append((x.dtype, weight))
        if out.dtype.itemsize == 1:
            made.append(weight)
        if x.dtype.itemsize == 1:
            assert options["epilogue"].half_accumulate == (kind == "fp8")
        return reference_conv(x, weight, out, **options)

    reference_conv = fused_run.conv3d
    monkeypatch.setattr(fused_run, "conv3d", convolving)
    sampling.decode(mixed(model, "decoder", kind, ranges), samples[0])
    assert {weight.kernel for weight in made} == {(3, 1, 1)}
    assert len({id(weight) for weight in made}) == 2
    assert all(dtype == weight.data.dtype for dtype, weight in read)
    eight = {id(weight) for dtype, weight in read if dtype.itemsize == 1}
    assert len(eight) == len(eligible(model.decoder))
    sampling.encode(mixed(model, "encoder", kind, ranges), samples[1])
    eight = {id(weight) for dtype, weight in read if dtype.itemsize == 1} - eight
    assert len(eight) == len(eligible(model.encoder))


def exact_product(x, rows, weight, geometry, shift, size):
    """In float64, where the order of sums does not show."""
    (st, sh, sw), (kt, kh, kw), (d, h, w) = geometry.stride, weight.kernel, size
    oy, ox = geometry.origin[0] + shift[0], geometry.origin[1] + shift[1]
    window = x[: (d - 1) * st + kt, oy : oy + (h - 1) * sh + kh, ox : ox + (w - 1) * sw + kw, : weight.channels]
    kernel = rows.double().view(-1, kt, kh, kw, weight.channels).permute(0, 4, 1, 2, 3)
    out = F.conv3d(window.double().permute(3, 0, 1, 2)[None], kernel, stride=geometry.stride)
    return out[0].permute(1, 2, 3, 0).float()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@torch.no_grad()
def test_equal_bits(network, ranges, kind, monkeypatch):
    """Every chunking and parking gives the same bits."""
    monkeypatch.setattr(reference, "product", exact_product)
    version, model = network
    # More than one band at full size.
    z = torch.randn(3, 9 if version == "2.1" else 5, 2, SIZES[version][0], generator=torch.Generator().manual_seed(3))
    decoder = mixed(model, "decoder", kind, ranges)

    def decode(chunk, frames, parking=None):
        run = decoder.plan(chunk, *z.shape[1:3], frames, torch.float32, CPU, parking)
        stated = run.nbytes
        run.allocate()
        out = []
        for part in z.split(chunk):
            run.scout(lambda part=part: decoder.chunk(run, part, frames, torch.float32, out.append))
            decoder.chunk(run, part, frames, torch.float32, lambda x: out.append(x.clone()))
        assert run.nbytes == stated
        run.free()  # what is parked lies in memory of the process
        return torch.cat(out)

    whole = decode(3, 0)
    for options in ((1, 1), (2, 3, Parking(None, 0))):
        assert torch.equal(decode(*options), whole), options


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@torch.no_grad()
def test_equal_bits_encode(network, ranges, kind, monkeypatch):
    """Every chunking of an encode gives the same bits."""
    monkeypatch.setattr(reference, "product", exact_product)
    model = network[1]
    # An odd width, and more than one band at full size.
    size = (72 * model.config.patch, 16 * model.config.patch + 3 - model.config.patch)
    video = torch.rand(9, *size, 3, generator=torch.Generator().manual_seed(4)).to(BF16) * 2 - 1
    encoder = mixed(model, "encoder", kind, ranges)

    def encode(lengths, frames, parking=None):
        run = encoder.plan(max(n // 4 for n in lengths) + 1, *size, frames, CPU, parking)
        stated = run.nbytes
        run.allocate()
        out = []
        for part in video.split(lengths):
            run.scout(lambda part=part: encoder.chunk(run, part, frames))
            out.append(encoder.chunk(run, part, frames).clone())
        assert run.nbytes == stated
        run.free()  # what is parked lies in memory of the process
        return torch.cat(out)

    whole = encode([9], 0)
    assert whole.isfinite().all() and whole.std() > 0.01
    for options in (([1, 4, 4], 1), ([5, 4], 3, Parking(None, 0))):
        assert torch.equal(encode(*options), whole), options


@torch.no_grad()
def test_memory(network, ranges):
    """Histories and operands in 8 bit take less memory."""
    decoder = network[1].decoder
    networks = fuse(decoder, BF16), mixed(network[1], "decoder", "fp8", ranges)
    plans = [n.plan(1, 8, 8, 1, torch.float32, CPU) for n in networks]
    assert plans[1].nbytes < 0.8 * plans[0].nbytes
    assert plans[1].arena.peak <= plans[0].arena.peak


@pytest.fixture(scope="module")
def file(network, tmp_path_factory):
    version, model = network
    path = tmp_path_factory.mktemp("wan8") / f"{version}.safetensors"
    save_file({name: p.float() for name, p in model.state_dict().items()}, path)
    return version, path


def db(a, b):
    return 10 * math.log10(1 / (a - b).double().square().mean().item())


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_decode_and_encode(file, noise, precision, monkeypatch):
    version, path = file
    c, h, w = SIZES[version]
    z, exact = noise(1, c, 3, h, w), load(path, device="cpu")
    side = 2 * exact.spatial
    video = noise(5, side, side + 3, 3).clamp(-1, 1) * 0.5 + 0.5
    vae = load(path, precision=precision, device="cpu")
    assert (vae.precision, vae.dtype) == (precision, BF16)
    assert vae.plan_decode(3, h, w).fused
    out = vae.decode(z)
    assert 20 < db(out, exact.decode(z)) < 60
    assert vae.last_report.operands.startswith(f"31 of 31 convolutions in {precision}")
    assert vae.last_report.precision == precision
    assert "fp8" not in dict(vae.last_report.off)
    latent = vae.encode(video)
    assert vae.last_report.operands.startswith(f"20 of 20 convolutions in {precision}")
    # What was measured and packed is found again, and gives the same bits.
    monkeypatch.setattr(sampling.Trials, "__init__", lambda *_: pytest.fail("measured again"))
    again = load(path, precision=precision, device="cpu")
    pack = again.fused()._pack

    def plans_only(half, model):
        assert next(model.parameters()).is_meta, "packed again"
        return pack(half, model)

    again.fused()._pack = plans_only
    assert torch.equal(again.decode(z), out)
    assert torch.equal(again.encode(video), latent)


@pytest.mark.parametrize("network", ["2.2"], indirect=True)
def test_floor(file, noise):
    """A floor leaves out what costs most."""
    version, path = file
    z = noise(1, SIZES[version][0], 2, 1, 2)
    loose = load(path, precision="fp8", device="cpu", min_db=10.0)
    loose.decode(z)
    vae = load(path, precision="fp8", device="cpu", min_db=loose.last_report.db + 3)
    vae.decode(z)
    report = vae.last_report
    assert report.db >= vae.options.min_db
    assert 0 < int(report.operands.split()[0]) < 31


def test_calibration(file, noise, tmp_path, capsys, monkeypatch):
    """A calibration is kept and used."""
    version, path = file
    c, h, w = SIZES[version]
    z = noise(1, c, 2, h, w)
    save_file({"latent": z}, tmp_path / "z.safetensors")
    assert main(["calibrate", str(path), "--latent", str(tmp_path / "z.safetensors"), "--ranges-only", "--device",
                 "cpu"]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "decoder: ranges of" in out
    assert "all in int8" in out and "dB against bf16" in out
    monkeypatch.setattr(sampling.Trials, "__init__", lambda *_: pytest.fail("measured again"))
    vae = load(path, precision="int8", device="cpu")
    vae.decode(z)
    assert "ranges from z.safetensors" in vae.last_report.operands
    assert main(["info", str(path)]) == 0
    assert "decoder: ranges of" in capsys.readouterr().out
    assert vae.last_report.operands in vae.last_report.text()


def test_calibrate_both(file, noise):
    """Both components are calibrated on a clip."""
    vae = load(file[1], precision="int8", device="cpu")
    side = 2 * vae.spatial
    outcomes = list(calibrate(vae, "clip", noise(5, side, side, 3).sigmoid(), None, False, lambda: None))
    assert [o.half for o in outcomes] == ["encoder", "decoder"]
    assert all(20 < o.whole[kind][0] < 70 for o in outcomes for kind in ("fp8", "int8"))
    assert vae.store.table("encoder").fits(eligible(vae.model.encoder))


def test_bf16(file, monkeypatch):
    """bf16 activations never sum in fp16: where a GPU gains by such sums, those of Wan are fp16."""
    vae = load(file[1], precision="fp16_fast", device="cpu")
    assert vae.precision == "bf16"
    assert "made for fp16" in vae.unused()["fp16_fast"]
    monkeypatch.setattr(loader, "target", lambda device: prebuilt("RTX 5070 Ti", 120, "C"))
    assert load(file[1], precision="fp16_fast", device="cpu").dtype == torch.float16
    assert load(file[1], precision="int8", device="cpu").dtype == torch.bfloat16
