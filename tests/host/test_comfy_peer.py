"""The bench's ComfyUI rows come from a real ComfyUI."""

import pytest
import torch
from zerowaste_vae.engine.bench import schema
from zerowaste_vae.engine.bench.measure import Bench, Case
from zerowaste_vae.engine.bench.subject import PUBLISHED, random_checkpoint

pytestmark = pytest.mark.host


def test_comfyui_gets_the_same_weights_and_input(host_places):
    folder, venv = host_places
    bench = Bench(random_checkpoint(PUBLISHED), torch.device("cpu"), 1, 1)
    case = Case("decoder", "fp32", 1, 16, 24)
    rows = list(bench.comfy_peers(case, str(folder), str(venv / "bin" / "python")))
    schema.report("decode", {}, {}, rows)
    for row in rows[:2]:
        assert row["skipped"] is None and row["ran"].startswith("ComfyUI 0.")
        assert row["db_note"] == "equal to fp32" or row["db"] > 100, row["db_note"]
    assert all("needs a GPU" in row["skipped"] for row in rows[2:])
