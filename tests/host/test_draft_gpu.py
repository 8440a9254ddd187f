"""Drafts and previews of all frames at Wan's published widths, in a real ComfyUI on a GPU."""

from __future__ import annotations

import io

import numpy as np
import pytest
import running
import torch
from PIL import Image
from safetensors.torch import save_file
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import by_name, taehv

pytestmark = [pytest.mark.host, pytest.mark.gpu]


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


@pytest.fixture(scope="module")
def server(tmp_path_factory, host_places):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    with running.serving(tmp_path_factory.mktemp("drafts"), host_places, device=()) as comfy:
        models, tiny = comfy.base / "models", taehv.ARCHITECTURE
        (models / "vae_approx").mkdir(exist_ok=True)
        drawn = random_checkpoint(tiny.published.sizes("taew2_1"), architecture=tiny).tensors
        published = {n: t for n, t in drawn.items() if n not in (taehv.SCALE, taehv.SHIFT)}
        save_file(published, models / "vae_approx" / "taew2_1.safetensors")
        wan = by_name("wan2.1")
        save_file(random_checkpoint(wan.published.config, architecture=wan).tensors, models / "vae" / "wan.safetensors")
        z = torch.randn(1, 16, 21, 60, 104, generator=torch.Generator().manual_seed(0))
        content = {"latent_tensor": z, "latent_format_version_0": torch.tensor([])}
        save_file(content, comfy.base / "input" / "wan.latent")
        yield comfy


def graph(**widgets) -> dict:
    return {
        "z": node("LoadLatent", latent="wan.latent"),
        "vae": node("ZeroWasteVAELoader", vae_name="wan.safetensors"),
        "decode": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0], **widgets),
        "some": node("ImageFromBatch", image=["decode", 0], batch_index=40, length=2),
        "save": node("SaveImage", images=["some", 0], filename_prefix="draft"),
    }


def test_a_draft_and_a_preview_of_81_frames(server):
    """The draft's memory is as planned; a preview changes neither the decode's plan nor its frames, and plays."""
    runs = [server.run(graph(**widgets), **extra) for widgets, extra in (
        ({"draft": True}, {}), ({"ram_gb": 60}, {}), ({"ram_gb": 61}, {"preview_method": "auto"}),
    )]  # fmt: skip
    assert [run.status for run in runs] == ["success"] * 3, [run.error for run in runs]
    draft, quiet, played = (run.outputs["decode"]["zerowaste"][0] for run in runs)
    print([report["text"] for report in (draft, quiet, played)])  # for whoever measures
    assert draft["plan_facts"]["draft"] == "TAEHV" and draft["clip"]["frames"] == 81
    assert draft["reserved_gb"] - draft["before_gb"] <= draft["predicted_gb"]
    assert played["predicted_gb"] == quiet["predicted_gb"]
    assert "preview of all frames by taew2_1.safetensors: " in played["text"] and quiet["text"].count("preview") == 0
    assert np.array_equal(*(server.images(run, "save") for run in runs[1:]))
    assert not runs[1].previews() and Image.open(io.BytesIO(runs[2].previews()[0])).size[0] == 512
