"""Weights that wait in host memory: what a run takes of them to the device, and what stays there. No GPU is asked: a
VAE that says it runs on one plans as it would; where values count, a CPU stands in for it."""

import copy
import json
import threading
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae import VideoVAE, load
from zerowaste_vae.engine.errors import PlanError
from zerowaste_vae.engine.execution import components as halves
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.distributed.devices import copies_on
from zerowaste_vae.engine.families import minimax_h3
from zerowaste_vae.engine.network.offload import moving_bytes
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning import make
from zerowaste_vae.engine.planning.besides import CUBLAS_BYTES, LIBRARY_BYTES
from zerowaste_vae.engine.planning.budget import Limits
from zerowaste_vae.engine.planning.plain_walk import Torch
from zerowaste_vae.engine.precision.modes import Mode
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.runtime.kept import KEPT
from zerowaste_vae.engine.system.memory import GIB

CPU, GPU, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
SIZE = 2, 6, 8


@pytest.fixture
def file(make_vae_file):
    """As narrow as the fused operators take."""
    return make_vae_file((16, 16, 32, 32), (16, 16, 32, 32))


@pytest.fixture
def on_gpu(file, monkeypatch):
    """options of load -> a VAE that says it runs on a GPU, on fused kernels where `fused` is true."""

    def made(fused=True, **options):
        monkeypatch.setattr("zerowaste_vae.engine.loader.placement", lambda *_: GPU)
        monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None if fused else "not here")
        return load(file, "fp16", **options)

    return made


@pytest.fixture
def apart(file, monkeypatch):
    """A VAE on a CPU whose plain halves are copies, as those of weights that wait elsewhere."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    monkeypatch.setattr(halves, "lent", lambda device, *parts: copy.deepcopy(parts))
    return load(file, "fp32", device="cpu")


def test_waiting_weights(on_gpu):
    """Weights wait where nobody else moves them."""
    vae = on_gpu()
    assert vae.device == GPU and vae.home == CPU
    assert all(p.device == CPU for p in vae.model.parameters())
    own = [*vae.model.parameters()]
    assert vae.to(OTHER).device == OTHER and vae.home == CPU and vae.planner._besides("decoder", True) == CUBLAS_BYTES
    vae.to("cpu")
    assert vae.home == CPU and vae.planner._besides("decoder", True) == LIBRARY_BYTES + sum(p.nbytes for p in own)
    assert all(p is q for p, q in zip(own, vae.model.parameters(), strict=True))


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_plans_count_what_is_on_the_device(on_gpu, half):
    """Count packed weights alone for a fused run, the component for plain torch, and all of them for a host that
    moves weights."""
    fused, hosts = on_gpu(), on_gpu(weights_on=CPU)
    whole = sum(p.nbytes for p in fused.model.parameters())
    own = sum(p.nbytes for p in getattr(fused.model, half).parameters())
    assert 0 < own < whole and (hosts.home, fused.home) == (GPU, CPU)
    peaks = [vae.planner.plan(half, SIZE).peak_bytes for vae in (fused, hosts)]
    assert peaks[1] - peaks[0] == LIBRARY_BYTES + whole - CUBLAS_BYTES
    assert fused._held(half) == 0 and fused.with_options(DEFAULTS).planner.plan(half, SIZE).peak_bytes == peaks[0]
    fused, hosts = on_gpu(fused=False), on_gpu(fused=False, weights_on=CPU)
    plans = [vae.planner.plan(half, SIZE) for vae in (fused, hosts)]
    copied = plans[0].peak_bytes - plans[1].peak_bytes + whole
    assert not plans[0].fused and own <= copied < own + (22 << 20)  # torch's last segments are not full


def test_the_command_plans_for_what_load_makes(on_gpu, file, capsys):
    asked = ["plan", "--vae", str(file), "--size", "64x48", "--frames", "5", "--precision", "fp16", "--vram-gb", "4"]
    assert main([*asked, "--json"]) == 0
    peak = json.loads(capsys.readouterr().out)["plans"][0]["peak_gb"]
    assert peak * GIB == on_gpu().planner.plan("decoder", SIZE, Request(vram_gb=4.0)).peak_bytes


def test_targets_are_met_with_what_is_counted(on_gpu):
    """A target that leaves no room for all weights has room for a fused run."""
    fused, hosts = on_gpu(), on_gpu(weights_on=CPU)
    least = fused.planner.plan("decoder", SIZE, Request("untiled")).peak_bytes
    limits = Limits(least, host=0)
    assert fused.planner.plan("decoder", SIZE, Request("untiled"), limits).peak_bytes == least
    leaner = hosts.planner.plan("decoder", SIZE, Request("untiled"), limits)
    assert leaner.peak_bytes <= least and leaner.steps.frames < fused.planner.plan("decoder", SIZE).steps.frames


def test_packed_weights_pin_no_segment_of_an_earlier_run(on_gpu, monkeypatch):
    """Free the memory that an earlier run has left before a component is packed, and not again once it is packed."""
    vae, done = on_gpu(), []

    class Earlier:
        device, nbytes = GPU, 1

        def free(self):
            done.append("kept memory freed")

    def pack(*_):
        done.append("packed")
        return SimpleNamespace(nbytes=1)

    monkeypatch.setattr(halves, "empty_device_cache", lambda: done.append("cache emptied"))
    monkeypatch.setattr(halves, "gathered", pack)
    earlier = Earlier()
    for half in ("decoder", "encoder", "encoder"):
        del done[:]
        known = vae._fused.packed_bytes(half)
        KEPT.keep(earlier)
        vae._fused.pack(half)
        assert done == ([] if known else ["kept memory freed", "cache emptied", "packed", "cache emptied"])
    KEPT.release(GPU)


def test_transformer_plans():
    """A transformers plans count what it has besides its layers."""
    config = minimax_h3.ARCHITECTURE.published.config
    planners = [
        make.make_planner(
            minimax_h3.ARCHITECTURE, config, torch.float16, DEFAULTS, Mode(), lambda: True,
            lambda: Torch(reserves=True), waits=waits,
        )
        for waits in (False, True)
    ]  # fmt: skip
    model = planners[0]._model
    everything = LIBRARY_BYTES + moving_bytes(model, itemsize=2)
    for half, transformer in ("encoder", False), ("decoder", True):
        own = moving_bytes(*getattr(model, half).everything(), itemsize=2)
        copied = planners[1]._besides(half, False) - LIBRARY_BYTES
        assert own <= copied < 1.1 * own + (22 << 20)  # torch's segments are not full
        plans = [planner.plan(half, (7, 20, 24)) for planner in planners]
        there = LIBRARY_BYTES + copied if transformer else CUBLAS_BYTES
        assert plans[0].peak_bytes - plans[1].peak_bytes == everything - there


def test_several_devices_share_waiting_weights(on_gpu):
    vae = on_gpu()
    first, second, again = copies_on(vae, [GPU, OTHER, OTHER])
    assert first is vae and second.model is vae.model is again.model
    assert second.device == OTHER and second._fused is not vae._fused is not again._fused
    vae.release()


def test_plain_copy(apart, noise):
    """Plain torch runs a copy until the half runs fused."""
    vae, z, video = apart, noise(1, 16, 2, 3, 4), noise(5, 24, 32, 3).sigmoid()
    plain = vae.with_options(DEFAULTS.switched(off=["triton_fusion"]))
    own = sum(p.nbytes for p in vae.model.decoder.parameters())
    frames, raw = plain.decode(z), plain.decode_raw(z)
    kept = plain._plain.there("decoder", CPU)
    assert kept is plain._plain.there("decoder", CPU) is not vae.model.decoder
    assert plain.packed_bytes == own and plain._held("encoder") == vae._held("encoder")
    plan = plain.planner.plan("encoder", (2, 3, 4))
    assert plain.plan_encode(2, 3, 4).peak_bytes == plan.peak_bytes + own  # it stays beside the encode
    plain.encode(video)
    assert plain.packed_bytes == sum(p.nbytes for p in vae.model.parameters())
    assert plain.release() == sum(p.nbytes for p in vae.model.parameters()) and plain.packed_bytes == 0
    assert torch.equal(plain.decode(z), frames) and torch.equal(vae.decode_raw(z), raw)
    assert vae._plain.packed_bytes("decoder") == own
    vae.encode(video)
    assert vae._plain.packed_bytes("decoder") == own  # of the other half, and counted beside
    vae.decode(z)
    assert vae.last_report.mode.startswith("reference") and vae._plain.packed_bytes("decoder") == 0
    assert vae.packed_bytes == vae._fused.packed_bytes("decoder") + vae._fused.packed_bytes("encoder")


def test_copy_by_thread(apart, noise):
    """A call in another thread has a copy of its own."""
    vae, z, found = apart.with_options(DEFAULTS.switched(off=["triton_fusion"])), noise(1, 16, 2, 3, 4), []
    frames = vae.decode(z)
    kept = vae._plain.there("decoder", CPU)

    def beside(done, total):
        if not found:
            other = threading.Thread(target=lambda: found.append(vae.decode(z)))
            other.start()
            other.join()

    assert torch.equal(vae.decode(z, progress=beside), frames) and torch.equal(found[0], frames)
    assert vae._plain.there("decoder", CPU) is kept


def test_layout(apart):
    """Convolutions of a copy have the layout that options ask for."""
    last = DEFAULTS.switched(on=["channels_last_3d"], off=["triton_fusion"])
    vae, layout = apart.with_options(last), torch.channels_last_3d
    weight = vae._plain.there("decoder", CPU).conv_in.weight
    assert vae._plain.layout == "NDHWC" and weight.is_contiguous(memory_format=layout)
    assert apart.model.decoder.conv_in.weight.is_contiguous()


def test_failed_copy(apart, noise, monkeypatch):
    """A copy that finds no memory leaves nothing."""
    def full(device, *parts):
        raise torch.OutOfMemoryError("CUDA out of memory")

    z, lend, vae = noise(1, 16, 1, 2, 2), halves.lent, apart.with_options(DEFAULTS.switched(off=["triton_fusion"]))
    monkeypatch.setattr(halves, "lent", full)
    with pytest.raises(PlanError, match="out of memory in the smallest steps"):
        vae.decode(z)
    assert vae.packed_bytes == 0
    monkeypatch.setattr(halves, "lent", lend)
    assert torch.isfinite(vae.decode(z)).all()


def test_a_deep_copy_waits_too(on_gpu):
    vae = on_gpu()
    other = copy.deepcopy(vae)
    assert isinstance(other, VideoVAE) and other.home == CPU and other.model is not vae.model
    assert other.planner.plan("decoder", SIZE).peak_bytes == vae.planner.plan("decoder", SIZE).peak_bytes
