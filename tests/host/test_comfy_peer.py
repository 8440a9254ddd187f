"""The bench's ComfyUI rows come from a real ComfyUI."""

import json

import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.extras.bench import peers, schema
from zerowaste_vae.engine.extras.bench.measure import Bench, Case
from zerowaste_vae.engine.extras.bench.subject import read_weights
from zerowaste_vae.engine.extras.cli import main

pytestmark = pytest.mark.host


@pytest.mark.parametrize(
    ("family", "half", "size", "compared"),
    [
        ("seedvr2", "decoder", (1, 16, 24), 1),
        ("wan2.1", "encoder", (5, 16, 24), 5),
        ("flux", "decoder", (3, 32, 24), 2),  # pictures
        ("flux", "encoder", (2, 32, 24), 2),
        ("ltx", "decoder", (17, 64, 32), 9),  # frames depend on those behind them: the first are a clip of their own
    ],
)
def test_comfyui_gets_the_same_weights_and_input(host_places, family, half, size, compared):
    folder, venv = host_places
    bench = Bench(read_weights(family), torch.device("cpu"), 1, compared)
    case = Case(half, "fp32", *size)
    rows = list(bench.comfy_peers(case, str(folder), str(venv / "bin" / "python")))
    schema.report("decode", {}, {}, rows)
    for row in rows[:2]:
        assert row["skipped"] is None and row["ran"].startswith("ComfyUI 0.")
        assert row["db_note"] == "equal to fp32" or row["db"] > 100, row["db_note"]
    assert all("needs a GPU" in row["skipped"] for row in rows[2:])


def test_compare_shows_what_cores_tiles_cost(host_places, monkeypatch, tmp_path, capsys):
    """LTX's usual workflow decodes in tiles; here frames are whole under a target, too."""
    folder, venv = host_places
    monkeypatch.setattr(peers, "COMFY_TILE", 64)
    monkeypatch.setattr(peers, "COMFY_OVERLAP", 32)
    bench = Bench(read_weights("ltx"), torch.device("cpu"), 1, 9)
    case = Case("decoder", "fp32", 9, 128, 96)
    vae = bench.load("fp32")
    latent = case.input(vae)
    whole = vae.decode(latent)
    job = {"half": "decoder", "precision": "fp32", "device": "cpu", "runs": 1, "metadata": dict(bench.weights.metadata),
           "spatial": vae.spatial, "temporal": vae.temporal}  # fmt: skip
    rows = peers.comfy(str(folder), str(venv / "bin" / "python"), vae.model.state_dict(), latent, latent, job)
    (plain, core), (tiled, tiles) = next(rows), next(rows)
    assert plain["skipped"] is None and tiled["skipped"] is None
    shown = {}
    for name, frames in (("ours", whole), ("core", core), ("tiles", tiles)):
        save_file({"frames": frames.contiguous()}, tmp_path / f"{name}.safetensors")
    for name in ("core", "tiles"):
        path = tmp_path / f"{name}.json"
        files = [str(tmp_path / f"{which}.safetensors") for which in (name, "ours")]
        edges = ["--rows", "32", "64", "--columns", "32", "64", "96"]
        assert main(["compare", *files, *edges, "--json", str(path)]) == 0
        shown[name] = json.loads(path.read_text()), capsys.readouterr().out
    assert shown["core"][0]["psnr"] > 100
    assert shown["tiles"][0]["psnr"] < 60 and "found" in shown["tiles"][1], shown["tiles"][1]
