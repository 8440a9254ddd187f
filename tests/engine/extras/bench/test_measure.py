import sys
from functools import partial

import pytest
import torch
from zerowaste_vae.engine.checkpoints import Checkpoint
from zerowaste_vae.engine.errors import CheckpointError
from zerowaste_vae.engine.extras.bench import peers, schema
from zerowaste_vae.engine.extras.bench.measure import Bench, Case, quality
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import kl, ltx

CPU = torch.device("cpu")
ABOUT = {
    "half": "decoder", "precision": "fp32", "device": "cpu", "runs": 1, "metadata": {}, "spatial": 8, "temporal": 4,
}  # fmt: skip


def test_rows(measured):
    """Rows say what ran."""
    ours, peer = measured["rows"]
    assert ours["who"] == "this pack" and not ours["fused"] and ours["ran"].startswith("plain torch (NCDHW), untiled")
    assert peer["ran"].startswith("plain torch (NDHWC)")
    assert ours["db"] is None and ours["db_note"] == "equal to fp32"
    assert ours["stated_gb"] > 0 and ours["ms_per_frame"] == pytest.approx(1e3 * ours["median_s"] / 5)
    assert ours["floor_share"] == pytest.approx(ours["floor_s"] / ours["median_s"])
    assert ours["off"]["triton_fusion"]


def test_encode(tiny):
    """Measure an encode and its quality."""
    bench = Bench(tiny, CPU, 1, 1)
    row = bench.ours(Case("encoder", "bf16", 1, 8, 8))
    schema.report("encode", {}, {}, [row])
    assert row["precision"] == "bf16" and 20 < row["db"] < 80 and row["db_note"].startswith("signal to error")


def test_pictures():
    """Pictures of an image VAE count one by one."""
    config = kl.Config((16, 16, 16, 16), (16, 16, 16, 16), norm_groups=8)
    bench = Bench(random_checkpoint(config, architecture=kl.FLUX), CPU, 1, 2)
    for half in ("decoder", "encoder"):
        row = bench.ours(Case(half, "bf16", 3, 16, 16))
        schema.report("decode", {}, {}, [row])
        assert row["frames"] == 3 and 20 < row["db"] < 90 and "first 2" in row["db_note"]


def test_quality_looking_ahead():
    """The first frames of a longer clip are others."""
    levels = (ltx.Block(64, 1), ltx.Block(32, stride=(2, 2, 2)), ltx.Block(32, 1), ltx.Block(16, stride=(2, 2, 2)))
    config = ltx.Config(None, (*levels, ltx.Block(8, stride=(2, 2, 2))), 0, 64)
    bench = Bench(random_checkpoint(config, architecture=ltx.ARCHITECTURE), CPU, 1, 9)
    row = bench.ours(Case("decoder", "fp32", 25, 64, 64))
    assert row["db_note"] == "equal to fp32" and row["frames"] == 25


def test_refused_plan(tiny, monkeypatch):
    """A refused plan is a row with its reason; a bug is an error."""
    bench = Bench(tiny, CPU, 1, 0)
    row = bench.ours(Case("decoder", "fp32", 5, 16, 16, target=0.001))
    assert "target" in row["skipped"] and "median_s" not in row and "db" not in row
    schema.report("decode", {}, {}, [row])
    monkeypatch.setattr("zerowaste_vae.engine.vae.VideoVAE.decode", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.ours(Case("decoder", "fp32", 5, 16, 16))
    row = bench.torch_peer(Case("decoder", "fp32", 5, 16, 16), "torch eager")
    assert row["skipped"].startswith("ZeroDivisionError") and "ms_per_frame" not in row


def test_compiled(tiny, monkeypatch):
    """The row of torch.compile says how much was compiled."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(peers, "_PARTS", ("between",))
    row = Bench(tiny, CPU, 1, 0).torch_peer(Case("decoder", "fp32", 5, 8, 8), "torch.compile")
    assert row["skipped"] is None and "compiled graphs, 0 graph breaks" in row["ran"]


def test_compiled_nothing(tiny, monkeypatch):
    """A torch.compile that compiled nothing has no times in its row."""
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    row = Bench(tiny, CPU, 1, 0).torch_peer(Case("decoder", "fp32", 1, 16, 16), "torch.compile")
    assert "compiled nothing" in row["skipped"]


def test_quality_unclamped():
    """Only values that fp32 leaves unclamped are compared."""
    reference = torch.tensor([0.0, 1.0, 0.5, 0.25]).view(1, 1, 2, 2, 1)
    result = torch.tensor([0.9, 0.1, 0.51, 0.24]).view(1, 1, 2, 2, 1)
    db, note = quality(torch.cat((result, result), 1), reference, "decoder")
    assert db == pytest.approx(40.0, abs=1e-3) and "first 1 frames" in note
    assert quality(result, "no room", "decoder") == (None, "no room")
    assert quality(result * float("nan"), reference, "decoder")[1] == "the result holds NaN or infinity"
    latent = torch.full((1, 1, 1, 2, 2), 3.0)
    assert quality(latent * 1.01, latent, "encoder")[0] == pytest.approx(40.0, abs=1e-3)


def test_unknown_weights():
    """Weights of no known VAE are refused."""
    with pytest.raises(CheckpointError, match="not a VAE"):
        Bench(Checkpoint({"a": torch.zeros(1)}), CPU, 1, 0)


@pytest.mark.parametrize(
    ("make", "precision", "says"),
    [
        (None, "fp32", "no ComfyUI there"),
        ("", "fp8", "has no fp8"),
        ("raise ImportError('no such thing')", "fp32", "no such thing"),
        ("import os; os._exit(7)", "fp32", "code 7"),
    ],
)
def test_comfyui_cannot_run(tmp_path, make, precision, says):
    """A ComfyUI that cannot run gives rows with the reason."""
    if make is not None:
        (tmp_path / "comfy").mkdir()
        (tmp_path / "comfy" / "sd.py").write_text(make)
        (tmp_path / "comfy" / "options.py").write_text("def enable_args_parsing(): pass")
    rows = list(peers.comfy(str(tmp_path), sys.executable, {"a": torch.zeros(1)}, torch.zeros(1), torch.zeros(1),
                            ABOUT | {"precision": precision}))
    assert [figures["who"] for figures, _ in rows] == [
        "ComfyUI", "ComfyUI, tiled", "ComfyUI, fp16 accumulation", "ComfyUI, fp16 accumulation, tiled",
    ]  # fmt: skip
    assert says in rows[0][0]["skipped"] and says in rows[1][0]["skipped"]
    assert all(result is None and "median_s" not in figures for figures, result in rows)


STUB = """
import torch
class VAE:
    def __init__(self, sd, dtype, metadata):
        self.vae_dtype = dtype
        self.weight = sd["a"]
    def throw_exception_if_invalid(self):
        pass
    def _decode_tiled_owned(self, z):
        return torch.zeros(1, 9, 8, 8, 3)
    def decode(self, z):
        return {plain}
    def decode_tiled(self, z, tile_x, tile_y, overlap, tile_t, overlap_t):
        assert (tile_x, tile_y, overlap, tile_t, overlap_t) == (64, 64, 8, 16, 2)
        return self._decode_tiled_owned(z)
"""


@pytest.mark.parametrize("retries", [False, True])
def test_comfyui_retried(tmp_path, retries):
    """A plain run that fell back to tiles is not called plain."""
    (tmp_path / "comfy").mkdir()
    plain = "self._decode_tiled_owned(z)" if retries else "z[..., None].expand(*z.shape, 3) + self.weight"
    (tmp_path / "comfy" / "sd.py").write_text(STUB.format(plain=plain))
    (tmp_path / "comfy" / "options.py").write_text("def enable_args_parsing(): pass")
    rows = list(peers.comfy(str(tmp_path), None, {"a": torch.ones(1)}, torch.ones(1, 9, 8, 8), torch.ones(1, 5, 8, 8),
                            ABOUT | {"runs": 2}))  # fmt: skip
    (plain, result), (tiled, _) = rows[:2]
    if retries:
        assert "went on in tiles" in plain["skipped"] and result is None
    else:
        assert plain["skipped"] is None and plain["runs"] == 2 and result.shape == (1, 5, 8, 8, 3)
        assert (result == 2).all() and "untiled" in plain["ran"]
    assert tiled["skipped"] is None and "tiles of 512" in tiled["ran"]
    assert "needs a GPU" in rows[2][0]["skipped"]
