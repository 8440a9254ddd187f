"""What a run says in the log: each documented line when, and only when, it is true."""

import logging

import pytest
import torch
from zerowaste_vae.engine import call as attempts
from zerowaste_vae.engine import load, log
from zerowaste_vae.engine import vae as vae_module
from zerowaste_vae.engine.errors import PlanError
from zerowaste_vae.engine.kernels.targets import capabilities
from zerowaste_vae.engine.report import Report

FP8, FUSION, LAYOUT = "FP8 Path Activated", "Triton kernel fusion enabled", "Channels_Last_3D Memory Format Applied."


@pytest.fixture
def said(monkeypatch, caplog):
    """said(words): whether a line with these words was logged since the last `said.forget()`."""
    caplog.set_level(logging.INFO, "zerowaste_vae")

    def look(words):
        return [m for m in caplog.messages if words in m]

    def forget():
        caplog.clear()
        monkeypatch.setattr(log, "_said", set())

    look.forget = forget
    forget()
    return look


@pytest.fixture
def on_gpu(monkeypatch):
    """What a VAE would say on a GPU of this generation, with the operands it settled for on a CPU."""

    def describe(vae, sm):
        plan = vae.plan_decode(1, 1, 2, 2)
        assert plan.fused
        with monkeypatch.context() as there:
            there.setattr(attempts, "target", lambda _: capabilities("GPU", sm, (3, 6)))
            there.setattr(type(vae), "unused", lambda *_: {})
            there.setattr(vae, "device", torch.device("cuda", 0))
            vae._describe(Report("decode", (1, 1, 16, 16), vae.arch, vae.precision, "GPU"), plan)

    return describe


@pytest.fixture(scope="module")
def wide_file(make_vae_file):
    return make_vae_file((16, 16, 32, 32), (16, 16, 32, 32), 4, 6)


def settled(file, noise, precision, min_db=0.0):
    vae = load(file, precision=precision, device="cpu", min_db=min_db)
    vae.decode(noise(1, 16, 1, 2, 2))
    return vae


def test_fp8_is_announced_where_fp8_operands_run(wide_file, noise, said, on_gpu):
    vae = settled(wide_file, noise, "fp8")
    assert not said(FP8)  # a CPU computes the numbers, but has no such path
    assert not said(FUSION)
    for sm in (90, 120):
        said.forget()
        on_gpu(vae, sm)
        assert said(f"sm_{sm} {FP8}.")
        assert said(FUSION)


def test_fp8_is_not_announced_for_int8_nor_where_a_floor_leaves_nothing(wide_file, noise, said, on_gpu):
    for vae in (settled(wide_file, noise, "int8"), settled(wide_file, noise, "fp8", min_db=200.0)):
        said.forget()
        on_gpu(vae, 120)
        assert not said(FP8)
        assert said(FUSION)


def test_plain_runs_announce_no_kernels_and_no_layout_they_lack(vae_file, noise, said):
    vae = load(vae_file, device="cpu")
    z = noise(1, 16, 1, 2, 2)
    vae.decode(z)
    assert not said(FP8)
    assert not said(FUSION)
    assert not said(LAYOUT)
    vae.options = vae.options.switched(on=["channels_last_3d"])
    vae.decode(z)
    vae.decode(z)
    assert len(said(LAYOUT)) == 1


def test_what_auto_gives_up_is_in_log_and_report(said, make_vae_file, noise):
    vae = load(make_vae_file(), device="cpu")
    z = noise(1, 16, 2, 24, 24)

    def tight(half):
        """A little less than whole frames need, in GB."""
        least = vae.planner.plan(half, 1, 2, 24, 24, tiling="untiled").peak_bytes
        while True:
            try:
                least = vae.planner.plan(half, 1, 2, 24, 24, tiling="untiled", target=least - 1).peak_bytes
            except PlanError:
                return 0.99 * least / 2**30

    small = tight("decoder")
    frames = vae.decode(z, vram_gb=small)
    assert frames.isfinite().all()
    assert said("decode: blended tiles are approximate; 192x192 untiled needs")
    assert "blended tiles are approximate" in vae.last_report.plan
    assert "blended tiles are approximate" in vae.last_report.text()
    said.forget()
    vae.decode(z)
    assert not said("approximate")
    video = frames[:, :5]
    vae.encode(video, vram_gb=tight("encoder"))
    assert said("encode: blended tiles are approximate")
    with pytest.raises(PlanError, match="192x192 untiled needs"):
        vae.decode(z, vram_gb=small, tiling="untiled")


def test_a_default_target_is_raised_to_what_is_free(said, make_vae_file, noise, monkeypatch):
    vae = load(make_vae_file(), device="cpu")
    least = vae.planner.plan("decoder", 1, 1, 4, 4, chunk=1).peak_bytes
    monkeypatch.setattr(vae_module, "memory_target", lambda *_: least - 1)
    monkeypatch.setattr(vae_module, "memory_room", lambda _, vram_gb, __: None if vram_gb else 2 * least)
    vae.decode(noise(1, 16, 1, 4, 4))
    assert said("is raised to the")
    assert vae.last_report.plan.startswith("plain torch, untiled")
    assert "is raised to the" in vae.last_report.plan


def test_a_leaner_plan_has_tiles_only_where_nothing_else_is_left(make_vae_file):
    """In the middle of a clip, too: whole frames need not start over."""
    vae = load(make_vae_file(), device="cpu")
    whole, tiled = (vae.planner.plan("decoder", 1, 2, 8, 8, tiling=t, tile=32, overlap=8) for t in ("auto", "blended"))
    found = {int(0.9 * whole.peak_bytes): tiled, whole.peak_bytes: whole}
    assert attempts._leaner(vae, lambda _, below: found[below], whole) is whole
    assert attempts._leaner(vae, lambda *_: tiled, whole) is tiled
