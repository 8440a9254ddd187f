"""What a run says in the log: each documented line when, and only when, it is true."""

import logging

import pytest
import torch
from zerowaste_vae.engine import attempts, load, log
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
