"""A run's report."""

import json

import pytest
import torch
from zerowaste_vae import Cancelled, PlanError
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.report import EVENTS, Report
from zerowaste_vae.engine.system.memory import GIB


@pytest.fixture
def fresh(vae):
    """The tiny VAE with no run behind it."""
    return vae.with_options(DEFAULTS)


def test_decode_and_encode_leave_a_report(fresh, noise):
    assert fresh.last_report is None
    fresh.decode(noise(2, 16, 3, 4, 5))
    report = fresh.last_report
    assert (report.operation, report.clip, report.complete) == ("decode", (2, 9, 32, 40), True)
    assert report.mode == "plain torch (NCDHW)" and (report.precision, report.device) == ("fp32", "cpu")
    plan = fresh.plan_decode(3, 4, 5)
    assert report.plan == plan.describe() and report.predicted_gb == plan.peak_bytes / GIB
    assert list(report.seconds) == ["plan", "decode"]
    assert report.total_seconds == sum(report.seconds.values()) > 0
    assert report.reserved_gb is report.allocated_gb is report.db is None
    fresh.encode(torch.rand(6, 17, 24, 3))
    assert fresh.last_report is not report
    assert (fresh.last_report.operation, fresh.last_report.clip) == ("encode", (1, 5, 17, 24))
    assert list(fresh.last_report.seconds) == ["plan", "encode"]


def test_packing(fresh, noise, monkeypatch):
    """Packing has its own time and is done once."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    for stages in (["plan", "weights", "decode"], ["plan", "decode"]):
        fresh.decode(noise(1, 16, 1, 2, 2))
        assert list(fresh.last_report.seconds) == stages
    assert fresh.last_report.mode == "reference operators (NDHWC)"  # of a CPU
    assert fresh.last_report.plan.startswith("reference operators, untiled")
    fresh.encode(torch.rand(1, 16, 16, 3))
    assert list(fresh.last_report.seconds) == ["plan", "weights", "encode"]


def test_text_and_dict_say_the_same(fresh, noise):
    fresh.decode(noise(1, 16, 2, 2, 2), tiling="blended", tile=16, overlap=0)
    report = fresh.last_report
    text, data = report.text(), json.loads(json.dumps(report.as_dict()))
    assert "decode 5 frames of 16x16" in text and report.plan in text
    assert data["clip"] == {"batch": 1, "frames": 5, "height": 16, "width": 16}
    assert data["complete"] is True and data["events"] == dict.fromkeys(EVENTS, 0)
    for entry in data["off"]:
        assert f"{entry['name']}: {entry['reason']}" in text
    assert {"name": "tf32", "reason": "off by default"} in data["off"] and "switched off" not in text
    assert "event" not in text and "dB" not in text and "reserved" not in text


def test_a_run_that_ends_early_says_so(fresh, noise):
    with pytest.raises(Cancelled):
        fresh.decode(noise(1, 16, 2, 2, 2), cancel=lambda: True)
    assert not fresh.last_report.complete and "NOT FINISHED" in fresh.last_report.text()
    with pytest.raises(PlanError):
        fresh.decode(noise(1, 16, 2, 2, 2), vram_gb=1e-6)
    assert not fresh.last_report.complete and list(fresh.last_report.seconds) == ["plan"]


def test_what_happened_on_the_way_is_shown():
    report = Report("decode", (1, 5, 8, 8), "seedvr2", "fp8", "cuda:0", db=51.26)
    report.events["oom_step_downs"] += 2
    report.reserved_gb, report.predicted_gb, report.parked_gb = 3.5, 3.25, 1.5
    text = report.text()
    assert "51.3 dB" in text and "2 x out of memory" in text
    assert "planned 3.25 GB, 1.50 GB parked in host memory, process peak 3.50 GB reserved" in text


def test_a_stage_entered_twice_adds_up(monkeypatch):
    clock = iter([1.0, 3.0, 10.0, 14.0, 20.0, 21.0])
    monkeypatch.setattr("zerowaste_vae.engine.report.time.perf_counter", lambda: next(clock))
    report = Report("decode", (1, 1, 8, 8), "seedvr2", "fp32", "cpu")
    for _ in range(2):
        with report.stage("a"):
            pass
    with pytest.raises(KeyError), report.stage("b"):
        raise KeyError
    assert report.seconds == {"a": 6.0, "b": 1.0}


def test_peaks(monkeypatch):
    """Peaks that rose are known and hidden ones are not."""
    allocated, reserved = {"current": GIB, "peak": 5 * GIB}, {"current": 2 * GIB, "peak": 6 * GIB}
    found = {"allocated_bytes": {"all": allocated}, "reserved_bytes": {"all": reserved}}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: found)
    report = Report("decode", (1, 1, 8, 8), "seedvr2", "fp16", "cuda:0")
    with report.measured(torch.device("cuda")):
        reserved["current"] = 4 * GIB
    assert (report.before_gb, report.allocated_gb, report.reserved_gb) == (1, None, 4)
    with report.measured(torch.device("cuda")):
        allocated["peak"], reserved["peak"], reserved["current"] = 7 * GIB, 8 * GIB, 3 * GIB
    assert (report.before_gb, report.allocated_gb, report.reserved_gb) == (1, 7, 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_measured_on_a_gpu():
    report = Report("decode", (1, 1, 8, 8), "seedvr2", "fp16", "cuda:0")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with report.measured(torch.device("cuda")):
        torch.empty(GIB // 4, dtype=torch.float32, device="cuda")
    assert report.allocated_gb * GIB == before + GIB
    assert report.reserved_gb >= report.allocated_gb


def test_trailing_frames(fresh):
    """Python leaves them out; whoever fills clips up says so."""
    vae = fresh
    for count, dropped in ((1, 0), (5, 0), (7, 2), (8, 3)):
        vae.encode(torch.rand(count, 16, 16, 3))
        assert vae.last_report.dropped == vae.last_report.as_dict()["dropped"] == dropped
        said = f"frames  the last {dropped} of {count} fill no latent and were left out"
        assert (said in vae.last_report.text()) == (dropped > 0)
        assert vae.last_report.text().startswith(f"run     encode {count - dropped} frames of 16x16\n")
        assert vae.last_report.clip == (1, count - dropped, 16, 16)
        list(vae.encode_stream(torch.rand(count, 16, 16, 3)))
        assert vae.last_report.dropped == dropped and vae.last_report.clip[1] == count - dropped
    vae.last_report.repeated = 2
    assert "frames  the last one was repeated 2 times to fill a latent" in vae.last_report.text()
