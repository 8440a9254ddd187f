"""Values that overflow at any chunk: made again in a safer precision, what is finished kept."""

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.errors import NonFiniteError
from zerowaste_vae.engine.network.plain import Half
from zerowaste_vae.engine.runtime.context import ExecutionContext

from .faults import SIZE, events


def poison(monkeypatch, dtypes, chunk, fused):
    """Infinity in one value at full size, in the chunk of this number, when it runs in one of `dtypes`."""
    if fused:
        original, seen = ExecutionContext.conv, {}

        def conv(self, up, x, out, *args, **options):
            sums = original(self, up, x, out, *args, **options)
            if not self.dry and up.key.endswith("up_blocks.2.upsamplers.0.conv"):
                seen[self.dtype] = seen.get(self.dtype, 0) + 1
                if self.dtype in dtypes and seen[self.dtype] == chunk:
                    out[-1, 1, 2, 3] = torch.inf
            return sums

        monkeypatch.setattr(ExecutionContext, "conv", conv)
        return
    original, seen = Half.high, {}

    def high(self, x, state=None):
        out = original(self, x, state)
        if out.device.type != "meta":
            seen[x.dtype] = seen.get(x.dtype, 0) + 1
            if x.dtype in dtypes and seen[x.dtype] == chunk:
                out[:, 0, -1, 1, 2] = torch.nan
        return out

    monkeypatch.setattr(Half, "high", high)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chunk", [1, 3])
def test_bf16_after_a_bad_chunk(make_vae, noise, monkeypatch, fused, chunk):
    """From a bad chunk on the clip goes on in bf16."""
    vae, z = make_vae("fp16", fused), noise(*SIZE)
    good = vae.decode(z, chunk=1)
    safer = vae._safer("").decode(z, chunk=1)
    assert (safer - good).abs().max() > 1e-4
    poison(monkeypatch, {torch.float16}, chunk, fused)
    out = vae.decode(z, chunk=1)
    kept = 0 if chunk == 1 else 4 * (chunk - 2) + 1
    assert torch.equal(out[:, :kept], good[:, :kept])
    assert torch.equal(out[:, kept:], safer[:, kept:])
    assert events(vae) == ({"nan_reruns": 1, "replayed_chunks": chunk - 1} if chunk > 1 else {"nan_reruns": 1})


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_from_8_bits_it_goes_on_in_fp16(make_vae_file, make_vae, noise, monkeypatch, tmp_path, precision):
    make_vae()
    monkeypatch.setenv("ZEROWASTE_CACHE", str(tmp_path))
    wide, z = make_vae_file((16, 16, 32, 32), (16, 16, 32, 32), 4, 6), noise(*SIZE)
    vae, safer = (load(wide, precision=p, device="cpu") for p in (precision, "fp16"))
    good, expected = vae.decode(z, chunk=1), safer.decode(z, chunk=1)
    assert not torch.equal(good, expected)
    poison(monkeypatch, {torch.float16}, 2, True)
    out = vae.decode(z, chunk=1)
    assert torch.equal(out[:, :1], good[:, :1])
    assert torch.equal(out[:, 1:], expected[:, 1:])
    assert events(vae)["nan_reruns"] == 1
    assert (vae.precision, vae.last_report.precision) == (precision, f"{precision}, then fp16")


def test_then_in_fp32_then_it_gives_up(make_vae, noise, monkeypatch):
    vae, z = make_vae("fp16", False), noise(2, *SIZE[1:])
    with monkeypatch.context() as patch:
        poison(patch, {torch.float16, torch.bfloat16}, 2, False)
        out = vae.decode(z, chunk=1)
    assert vae.last_report.events["nan_reruns"] == 2
    assert torch.isfinite(out).all()
    with monkeypatch.context() as patch:
        poison(patch, {torch.float16, torch.bfloat16, torch.float32}, 2, False)
        with pytest.raises(NonFiniteError, match="clip 0, 1 to 4, came out as NaN or Inf in fp32"):
            vae.decode(z, chunk=1)
    assert vae.precision == "fp16"


@pytest.mark.parametrize("fused", [True, False])
def test_real_overflow(make_vae_file, make_vae, noise, fused):
    """Convolutions whose results leave the range of fp16, but not that of bf16."""
    make_vae()
    wide = make_vae_file((16, 16, 16, 16), (16, 16, 16, 16))
    vae, z = load(wide, precision="fp16", device="cpu"), noise(*SIZE)
    vae.triton_fusion = fused
    for block in (vae.model.decoder.up_blocks[3].resnets[1], vae.model.encoder.mid_block.resnets[1]):
        block.conv2.weight.mul_(1e5)
    frames = vae.decode(z)
    assert vae.last_report.events["nan_reruns"] == 1
    assert torch.isfinite(frames).all()
    latent = vae.encode(torch.rand(5, 16, 16, 3))
    assert vae.last_report.events["nan_reruns"] == 1
    assert torch.isfinite(latent).all()


@pytest.mark.parametrize("fused", [True, False])
def test_a_bad_tile_is_made_again(make_vae, noise, monkeypatch, fused):
    vae, z = make_vae("fp16", fused), noise(1, 16, 2, 3, 4)
    options = {"tiling": "blended", "tile": 16, "overlap": 8, "chunk": 1}
    expected = vae.decode(z, **options)
    poison(monkeypatch, {torch.float16}, 4, fused)
    out = vae.decode(z, **options)
    assert vae.last_report.events["nan_reruns"] == 1
    assert (out - expected).abs().max() < 0.1
