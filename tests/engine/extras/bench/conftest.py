import copy

import pytest
import torch
from zerowaste_vae.engine.extras.bench import schema, timing
from zerowaste_vae.engine.extras.bench.measure import Bench, Case
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families.seedvr2 import Config


@pytest.fixture(scope="session", autouse=True)
def small_ceilings():
    """No test here looks at how fast a CPU is: its rates are those of small matrices and copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "SIDES", (timing.SIDES[0], 64))
        patch.setattr(timing, "COPIED", (timing.COPIED[0], 1 << 16))
        yield


@pytest.fixture(scope="session")
def tiny():
    """A checkpoint of widths 8 to 16."""
    return random_checkpoint(Config((8, 16, 16, 16), (8, 16, 16, 16), 16, 4))


@pytest.fixture(scope="session")
def measured(tiny):
    """A report of this pack and plain torch, decoding 5 frames of 16x24 on the CPU, measured once."""
    bench = Bench(tiny, torch.device("cpu"), 2, 5)
    case = Case("decoder", "fp32", 5, 24, 16)
    rows = [bench.ours(case), bench.torch_peer(case, "torch channels-last")]
    settings = {"weights": "tiny", "architecture": "seedvr2", "widths": bench.widths, "runs": 2, "input": "seeded"}
    return schema.report("decode", {"device": "cpu", "torch": torch.__version__, "threads": 1}, settings, rows)


@pytest.fixture
def gpu_report(measured):
    """A made-up report as a GPU would give it: shapes to draw, not a measurement."""
    report = copy.deepcopy(measured)
    report["environment"]["gpu"] = "Made-up GPU"
    report["settings"]["widths"] = [128, 256, 512, 512]
    ours, peer = report["rows"]
    trace = [[i / 10, 1 + i / 5, 2 + i / 5] for i in range(10)]
    figures = {"precision": "fp16", "process_gb": None, "allocated_gb": 3.0, "reserved_gb": 4.0, "trace": trace,
               "db_note": "PSNR"}
    ours.update(figures, fused=True, floor_s=0.1, median_s=0.125, low_s=0.12, high_s=0.13, floor_share=0.8,
                ms_per_frame=25.0, db=65.0, target_gb=None)
    peer.update(figures, floor_s=0.1, median_s=0.5, low_s=0.5, high_s=0.6, floor_share=0.2, ms_per_frame=100.0, db=64.0)
    report["rows"].append({**ours, "target_gb": 13.0})
    report["rows"].append({**{k: ours[k] for k in schema.ROW}, "who": "ComfyUI <0>", "skipped": "it & its reason"})
    return report
