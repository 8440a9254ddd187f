"""A run logs each documented line when, and only when, it is true."""

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from zerowaste_vae.engine import load, log
from zerowaste_vae.engine.errors import PlanError
from zerowaste_vae.engine.execution import call as attempts
from zerowaste_vae.engine.kernels.targets import capabilities
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.planning.budget import Limits, Machine
from zerowaste_vae.engine.planning.plan import Plan
from zerowaste_vae.engine.report import Report
from zerowaste_vae.engine.request import Request

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
    """Return what a VAE would say on a GPU of this generation, with the operands it settled for on a CPU."""

    def describe(vae, sm):
        plan = vae.plan_decode(1, 2, 2)
        assert plan.fused
        with monkeypatch.context() as there:
            there.setattr(attempts, "target", lambda _: capabilities("GPU", sm, (3, 6)))
            there.setattr(type(vae), "unused", lambda *_: {})
            there.setattr(vae, "device", torch.device("cuda", 0))
            attempts.describe(vae, Report("decode", (1, 1, 16, 16), vae.arch, vae.precision, "GPU"), plan)

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


def test_fp8_line(wide_file, noise, said, on_gpu):
    """Fp8 is not announced for int8 nor where a floor leaves nothing."""
    for vae in (settled(wide_file, noise, "int8"), settled(wide_file, noise, "fp8", min_db=200.0)):
        said.forget()
        on_gpu(vae, 120)
        assert not said(FP8)
        assert said(FUSION)


def test_plain_lines(vae_file, noise, said):
    """Plain runs announce no kernels and no layout they lack."""
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
    z = noise(1, 16, 2, 12, 12)

    def tight(half):
        """A little less than whole frames need, in GB."""
        least = vae.planner.plan(half, (2, 12, 12), Request("untiled")).peak_bytes
        while True:
            try:
                least = vae.planner.plan(half, (2, 12, 12), Request("untiled"), Limits(least - 1)).peak_bytes
            except PlanError:
                return 0.99 * least / 2**30

    small = tight("decoder")
    frames = vae.decode(z, vram_gb=small)
    assert frames.isfinite().all()
    assert said("decode: blended tiles are approximate; 96x96 untiled needs")
    assert "blended tiles are approximate" in vae.last_report.plan
    assert "blended tiles are approximate" in vae.last_report.text()
    said.forget()
    vae.decode(z)
    assert not said("approximate")
    video = frames[:, :5]
    vae.encode(video, vram_gb=tight("encoder"))
    assert said("encode: blended tiles are approximate")
    with pytest.raises(PlanError, match="96x96 untiled needs"):
        vae.decode(z, vram_gb=small, tiling="untiled")


def test_raised_target(said, make_vae_file, noise, monkeypatch):
    """A default target is raised to what is free."""
    vae = load(make_vae_file(), device="cpu")
    least = vae.planner.plan("decoder", (1, 4, 4), Request(chunk=1)).peak_bytes
    monkeypatch.setattr(Machine, "limits", lambda *_: Limits(least - 1, 2 * least))
    vae.decode(noise(1, 16, 1, 4, 4))
    assert said("is raised to the")
    assert vae.last_report.plan.startswith("plain torch, untiled")
    assert "is raised to the" in vae.last_report.plan


def test_leaner_plan(make_vae_file):
    """In the middle of a clip, too: whole frames need not start over."""
    vae = load(make_vae_file(), device="cpu")
    whole, tiled = (vae.planner.plan("decoder", (2, 8, 8), Request(t, 32, 8)) for t in ("auto", "blended"))
    less = vae.planner.plan("decoder", (2, 8, 8), Request(chunk=1))
    found = {int(0.9 * whole.peak_bytes): tiled, whole.peak_bytes: less}
    assert attempts._leaner(vae, "decoder", Request(), lambda _, below: found[below], [], whole) is less
    assert attempts._leaner(vae, "decoder", Request(), lambda *_: tiled, [], whole) is tiled


def test_leaner_plans_end(make_vae_file):
    """Where plans state more than they count, as far as a target has room, the same work is not tried again."""
    vae, tried = load(make_vae_file(), device="cpu"), []
    how = vae.planner._how()
    vae.planner._how = lambda: replace(how, reserves=True)
    plan, seen = vae.planner.plan("decoder", (5, 8, 8)), []

    def below(_, target):
        return vae.planner.plan("decoder", (5, 8, 8), Request(), Limits(target - 1))

    while plan is not None:
        seen.append(plan.work)
        assert seen.count(plan.work) == 1
        plan = attempts._leaner(vae, "decoder", Request(), below, tried, plan)
    assert len({plan.steps for plan in seen}) > 1 and seen[-1].tiled


def test_plan_callback(vae_file, noise, monkeypatch):
    """Made once, after what the clip settles, and told again only where another takes over."""
    vae = load(vae_file, device="cpu")
    made, told = [], []
    plan = vae.planner.plan
    monkeypatch.setattr(vae.planner, "plan", lambda *a, **o: made.append(plan(*a, **o)) or made[-1])
    vae.decode(noise(1, 16, 2, 2, 2), on_plan=told.append)
    assert len(made) == len(told) == 1
    assert told[0] is made[0]
    assert vae.last_report.plan == told[0].describe()
    vae.encode(torch.rand(1, 5, 16, 16, 3), on_plan=told.append)
    assert len(made) == len(told) == 2
    assert vae.last_report.plan == told[1].describe()


def test_given_plan(make_vae_file, noise, monkeypatch):
    """As a host has it that makes room for a plan: nothing is planned a second time."""
    vae, z, video = load(make_vae_file(), device="cpu"), noise(1, 16, 2, 4, 4), noise(5, 36, 36, 3).sigmoid()
    made, plan = [], vae.planner.plan
    monkeypatch.setattr(vae.planner, "plan", lambda *a, **o: made.append(plan(*a, **o)) or made[-1])
    calls = ("decoder", partial(vae.decode, z), (0, 0)), ("encoder", partial(vae.encode, video), (4, 4))
    for half, call, rest in calls:
        ready = vae.planner.plan(half, (2, 4, 4), Request(chunk=1), Limits(1 << 30), rest)
        for limits, ran in ((Limits(ready.peak_bytes), 1), (Limits(ready.peak_bytes - 1), 2)):
            monkeypatch.setattr(Machine, "limits", lambda *_, limits=limits: limits)
            told, made[1:] = [], []
            call(chunk=1, plan=ready, on_plan=told.append)
            assert len(made) == ran and told == [made[-1]]
            assert (told[0] is ready) == (ran == 1)
        made.clear()


def test_plan_of_other_operands(make_vae_file, noise, monkeypatch):
    """A plan made for other operands is made anew, by who made it if that asks for it."""
    vae, told = load(make_vae_file(), device="cpu"), []
    ready = vae.plan_decode(2, 2, 2)
    monkeypatch.setattr(vae, "_settle", lambda *_: True)
    vae.decode(noise(1, 16, 2, 2, 2), plan=ready, on_plan=told.append)
    assert told == [ready] and told[0] is not ready
    again, asked = vae.plan_decode(2, 2, 2, chunk=1), []
    vae.on_change = lambda planner: asked.append(planner) or again
    vae.decode(noise(1, 16, 2, 2, 2), plan=ready, on_plan=told.append)
    assert told[1] is again and asked == [vae.planner]
    vae.decode(noise(1, 16, 2, 2, 2), on_plan=told.append)  # there was no plan, so nobody made room for one
    assert told[2] == ready and len(asked) == 1


def test_raised_plan():
    """A raised plan keeps to what is free and a parked one to the hosts memory."""
    raised = Plan(Steps(1, 1), None, 10, raised=12)
    assert Limits(5, 11).hold(raised) and not Limits(5, 9).hold(raised)
    parked = Plan(Steps(1, 1), None, 10, host_bytes=7)
    assert Limits(10, host=7).hold(parked) and not Limits(10, host=6).hold(parked)
    assert Limits(None, host=None).hold(parked) and not Limits(9, host=None).hold(parked)


def test_other_component(wide_file, noise, monkeypatch):
    """They stay where they are: an encode's peak is reached with the decoder's beside it. What is planned is the same,
    and a plan that was made before they were there still fits."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    vae, video = load(wide_file, device="cpu", precision="fp16"), noise(5, 32, 48, 3).sigmoid()
    alone = vae.plan_encode(2, 4, 6)
    latent = vae.encode(video)
    assert alone.fused and vae.last_report.predicted_gb * 2**30 == alone.peak_bytes
    vae.decode(noise(1, 16, 1, 2, 2))
    beside = vae._fused.packed_bytes("decoder")
    after = vae.plan_encode(2, 4, 6)
    assert beside > 0 and after.peak_bytes == alone.peak_bytes + beside and after.with_beside(0) == alone
    monkeypatch.setattr(Machine, "limits", lambda *_: Limits(alone.peak_bytes))
    assert torch.equal(vae.encode(video, plan=alone), latent)
    assert vae.last_report.predicted_gb * 2**30 == after.peak_bytes
    leaner = vae._plan("encoder", (2, 4, 6), Request(), below=after.peak_bytes)
    assert leaner.peak_bytes < after.peak_bytes


def test_plain_weights(wide_file, noise, monkeypatch):
    """Its plan has no room for them."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    vae, z = load(wide_file, device="cpu", precision="fp16"), noise(1, 16, 2, 4, 4)
    video = noise(1, 16, 16, 3).sigmoid()
    vae.decode(z)
    vae.encode(video)
    assert vae._fused.packed_bytes("decoder") > 0 < vae._fused.packed_bytes("encoder")
    plan = vae.planner.plan
    monkeypatch.setattr(vae.planner, "plan", lambda *a, **o: replace(plan(*a, **o), fused=False))
    vae.decode(z)
    assert vae.last_report.mode.startswith("plain") and vae._fused.packed_bytes("decoder") == 0
    assert vae._fused.packed_bytes("encoder") > 0
