"""Chunking changes nothing but memory."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import load
from zerowaste_vae.engine.execution import plain_pass
from zerowaste_vae.engine.network.stream import frame_spans


@pytest.mark.parametrize(("chunk", "frames"), [(1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (2, 3), (5, 1), (99, 0)])
def test_decode_in_every_chunking(vae, noise, chunk, frames, atol):
    z = noise(2, 16, 5, 3, 4)
    torch.testing.assert_close(vae.decode_raw(z, chunk=chunk, frames=frames), vae.decode_raw(z), rtol=0, atol=atol)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8, 9, 16, 17])
@pytest.mark.parametrize(("chunk", "frames"), [(1, 0), (1, 1), (2, 3), (3, 0)])
def test_encode_in_every_chunking(vae, noise, count, chunk, frames, atol):
    x = noise(1, 3, count, 17, 24)
    whole = vae.model.encoder(x)
    assert whole.shape[2] == (count - 1) // 4 + 1
    torch.testing.assert_close(vae.encode_raw(x, chunk=chunk, frames=frames), whole, rtol=0, atol=atol)


def test_frame_spans():
    assert frame_spans(1, 0, 4) == [(0, 1)]
    assert frame_spans(17, 2, 4) == [(0, 5), (5, 13), (13, 17)]
    assert frame_spans(20, 1, 4) == [(0, 1), (1, 5), (5, 9), (9, 13), (13, 17)]


def test_golden_cases_stream(shared, tmp_path, atol):
    golden = shared / "golden" / "seedvr2"
    weights = {}
    for half in ("encoder", "decoder"):
        weights.update(load_file(golden / f"r16_weights_{half}.safetensors"))
    save_file(weights, tmp_path / "r16.safetensors", {"norm_num_groups": "8"})
    vae = load(tmp_path / "r16.safetensors", device="cpu")
    case = load_file(golden / "r16_decode.safetensors")
    for name in ("T5_5x6", "T5_3x3", "B2_T3_4x5", "T2_5x7", "T1_7x5"):
        z, whole = case[f"{name}.z"], case[f"{name}.unsliced"]
        for chunk, frames in ((0, 0), (1, 0), (2, 0), (3, 2), (1, 1)):
            torch.testing.assert_close(vae.decode_raw(z, chunk=chunk, frames=frames), whole, rtol=0, atol=atol)


@pytest.mark.parametrize("kept", [True, False])
def test_each_clip_and_tile_finds_an_empty_cache(vae, noise, monkeypatch, kept):
    """Empty torch's cache if it keeps freed blocks: those of one clip do not fit the next one's tensors."""
    emptied = []
    monkeypatch.setattr(plain_pass, "keeps_blocks", lambda device: kept and device == vae.device)
    monkeypatch.setattr(plain_pass, "empty_device_cache", lambda: emptied.append(len(emptied)))
    vae.decode(noise(2, 16, 3, 4, 6), tiling="untiled")
    vae.encode(torch.rand(1, 5, 32, 48, 3), tiling="untiled")
    assert len(emptied) == 3 * kept
    emptied.clear()
    vae.decode(noise(1, 16, 3, 4, 6), tiling="blended", tile=32, overlap=16)
    assert vae.last_report.plan.startswith("plain torch, 2 blended tiles") and len(emptied) == 3 * kept
    vae.encode(torch.rand(1, 5, 32, 48, 3), tiling="blended", tile=32, overlap=16)
    assert vae.last_report.plan.startswith("plain torch, 2 blended tiles") and len(emptied) == 6 * kept
