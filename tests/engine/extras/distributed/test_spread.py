"""Several devices, for which one CPU stands in several times: the bits of one, whatever happens to one of them."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from zerowaste_vae import Cancelled, InputError, VideoVAE, load
from zerowaste_vae.engine.errors import PlanError
from zerowaste_vae.engine.execution import call
from zerowaste_vae.engine.execution.results import Landed
from zerowaste_vae.engine.extras.distributed import devices, shares
from zerowaste_vae.engine.extras.distributed.devices import copies_on, resolve
from zerowaste_vae.engine.planning.fused_walk import FusedWalk

from .trouble import Failing, overflows

CPU = torch.device("cpu")
TWO = ["cpu", "cpu"]


@pytest.mark.parametrize("count, fused", [(2, True), (3, False)])
def test_frames_are_those_of_one(small, noise, early, count, monkeypatch):
    z, told, landed = noise(1, 16, 9, 2, 3), [], []
    whole, land = small.decode(z, chunk=1), Landed.land
    monkeypatch.setattr(Landed, "land", lambda self, *of: (landed.append(of), land(self, *of)))
    out = small.decode(z, chunk=1, devices=["cpu"] * count, progress=lambda done, total: told.append((done, total)))
    assert torch.equal(out, whole)
    assert sum(len(frames) for _, _, frames in landed) == 33
    report = small.last_report
    assert report.complete and len(report.parts) == count
    assert [r.start for r, _ in report.parts] == [0, *(r.stop for r, _ in report.parts[:-1])]
    assert all(part.complete and part.seconds["decode"] > 0 for _, part in report.parts)
    assert told == sorted(told) and told[-1][1] == 33 and told[-1][0] <= 33
    assert report.as_dict()["parts"][1]["first"] == report.parts[1][0].start
    assert f"{report.parts[0][0].stop - 1} on cpu" in report.text()


@pytest.mark.parametrize("fused", [True])
def test_steps(small, noise, early, monkeypatch):
    """Steps are longer if there is room for them; plans of one device are unchanged."""
    asked, steps = [], FusedWalk.frames_per_step
    monkeypatch.setattr(FusedWalk, "frames_per_step", lambda *a: asked.append(a[0].launched) or steps(*a))
    small.decode(noise(1, 16, 9, 2, 3), devices=TWO)
    assert asked[-1] == 2 and small.planner.walk.launched == 1
    one = small.plan_decode(4, 90, 160)
    small.planner.walk.launched = 2
    two = small.plan_decode(4, 90, 160)
    assert (one.steps.frames, two.steps.frames) == (1, 2) and two.peak_bytes > one.peak_bytes
    assert small.plan_decode(4, 90, 160, vram_gb=one.peak_bytes / 2**30).steps == one.steps


def test_a_part_and_a_batch_are_those_of_one(small, noise, early):
    z = noise(3, 16, 5, 2, 2)
    assert torch.equal(small.decode(z, chunk=1, devices=TWO), small.decode(z, chunk=1))
    part = small.decode(z[:1], chunk=1, devices=TWO, start=3, frames=9, output="uint8")
    assert torch.equal(part, small.decode(z[:1], chunk=1, start=3, frames=9, output="uint8"))


def test_tiles_are_those_of_one(small, noise, early, exact_sums):
    z, options = noise(1, 16, 5, 3, 4), {"tiling": "blended", "tile": 24, "overlap": 8, "chunk": 1}
    assert torch.equal(small.decode(z, devices=TWO, **options), small.decode(z, **options))


def test_latents_are_those_of_one(small, noise, early):
    video = noise(2, 25, 16, 25, 3).sigmoid()
    assert torch.equal(small.encode(video, chunk=1, devices=TWO), small.encode(video, chunk=1))
    assert torch.equal(small.encode(video, chunk=1, devices=TWO, seed=4), small.encode(video, chunk=1, seed=4))


def test_in_8_bit_all_follow_the_first(make_vae_file, noise, early, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROWASTE_CACHE", str(tmp_path))
    wide = make_vae_file((16, 16, 32, 32), (16, 16, 32, 32), 4, 6)
    z, vae = noise(1, 16, 5, 2, 2), load(wide, precision="fp8", device="cpu")
    assert torch.equal(vae.decode(z, chunk=1, devices=TWO), vae.decode(z, chunk=1))
    assert "in fp8" in vae.last_report.operands


@pytest.mark.parametrize("error", [PlanError("out of memory in the smallest steps"), RuntimeError("CUDA error: lost")])
@pytest.mark.parametrize("after", [0, 3])
def test_failing_device(small, noise, early, monkeypatch, error, after, caplog):
    """The part of one that fails goes to the others."""
    z = noise(1, 16, 7, 2, 2)
    whole = small.decode(z, chunk=1)
    failing = Failing(small, error, after)
    monkeypatch.setattr(call, "decode", failing)
    assert torch.equal(small.decode(z, chunk=1, devices=TWO), whole)
    assert [own for own, _ in failing.calls].count(False) == 1
    parts = small.last_report.parts
    assert parts[-1][0].stop == 25 and small.last_report.events["handed_over"] == 1
    assert "the rest of its part goes to cpu" in caplog.text


def test_other_errors(small, noise, early, monkeypatch):
    """Errors that are no devices are raised at once."""
    monkeypatch.setattr(call, "decode", Failing(small, InputError("not so")))
    with pytest.raises(InputError, match="not so"):
        small.decode(noise(1, 16, 7, 2, 2), chunk=1, devices=TWO)
    assert not any(t.name.startswith("zerowaste") for t in threading.enumerate())


def test_if_all_fail_the_error_is_raised(small, noise, early, monkeypatch):
    def lost(*_, **__):
        raise RuntimeError("CUDA error: lost")
        yield

    monkeypatch.setattr(call, "decode", lost)
    with pytest.raises(RuntimeError, match="lost"):
        small.decode(noise(1, 16, 7, 2, 2), chunk=1, devices=TWO)


def test_cancelling_stops_all(small, noise, early):
    z, told = noise(1, 16, 9, 2, 3), []
    with pytest.raises(Cancelled):
        small.decode(z, chunk=1, devices=TWO, progress=lambda *at: told.append(at), cancel=lambda: bool(told))
    assert not any(t.name.startswith("zerowaste") for t in threading.enumerate())
    assert not small.last_report.complete
    assert torch.equal(small.decode(z, chunk=1, devices=TWO), small.decode(z, chunk=1))


@pytest.mark.parametrize("bad", [0, 1])
def test_later_parts_follow_into_a_wider_type(make_vae_file, noise, early, monkeypatch, bad):
    """An overflow of the first part makes the second again; one of the second leaves the first."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: "off")
    vae = load(make_vae_file((8, 8, 8, 8), (8, 8, 8, 8), 2, 3), precision="fp16", device="cpu")
    z = noise(1, 16, 7, 2, 2)
    narrow, wide = vae.decode(z, chunk=1), vae._safer("").decode(z, chunk=1)
    overflows(monkeypatch, lambda start, done: bool(start) == bool(bad) and done > start + 4)
    out = vae.decode(z, chunk=1, devices=TWO)
    kept = next((n for n in range(25) if not torch.equal(out[:, n], narrow[:, n])), 25)
    border = vae.last_report.parts[0][0].stop
    assert 0 < kept < 25 and (kept < border) == (bad == 0)
    assert torch.equal(out[:, kept:], wide[:, kept:])
    assert vae.last_report.precision == "fp16, then bf16"


def other_memory(monkeypatch, own, sizes):
    """Automatic plans of the VAE itself are in tiles of sizes[0] (0: whole frames), those of its copies of sizes[1]."""
    plan = VideoVAE._plan

    def planned(self, half, size, request, *rest, **options):
        tile = sizes[self is not own]
        if request.tiling == "auto" and tile:
            request = replace(request, tiling="blended", tile=tile, overlap=8, chunk=0)
        return plan(self, half, size, request, *rest, **options)

    monkeypatch.setattr(VideoVAE, "_plan", planned)


def test_tiles_are_those_of_the_first(small, noise, early, monkeypatch, exact_sums):
    z = noise(1, 16, 7, 4, 5)
    tiled = small.decode(z, chunk=1, tiling="blended", tile=24, overlap=8)
    other_memory(monkeypatch, small, (24, 16))
    assert torch.equal(small.decode(z, chunk=1, devices=TWO), tiled)


def test_no_room(small, noise, early, monkeypatch, caplog):
    """A device without room for whole frames makes none."""
    z = noise(1, 16, 7, 4, 5)
    whole = small.decode(z, chunk=1)
    other_memory(monkeypatch, small, (0, 16))
    assert torch.equal(small.decode(z, chunk=1, devices=TWO), whole)
    assert small.last_report.events["handed_over"] == 1
    assert "whole frames do not fit there, and other parts have them" in caplog.text


def test_which_devices(vae, monkeypatch):
    assert resolve(None, CPU) == resolve("auto", CPU) == resolve("all", CPU) == [CPU]
    assert resolve("cpu, cpu", CPU) == resolve(["cpu", CPU], CPU) == [CPU, CPU]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    own = torch.device("cuda", 1)
    assert [d.index for d in resolve("all", own)] == [1, 0, 2]
    for wrong, says in (("cuda:3", "torch sees: 3"), ("nonsense", "not a device"), ([], "names none")):
        with pytest.raises(InputError, match=says):
            resolve(wrong, CPU)
    with pytest.raises(InputError, match="name that too"):
        vae.decode(torch.zeros(1, 16, 2, 2, 2), devices="meta")


def test_devices_of_different_kinds_are_asked_for(caplog):
    named = [("cuda:0", "a"), ("cuda:1", "a"), ("cuda:2", "b")]
    devices.same_kind(named[:2], False)
    with pytest.raises(InputError, match="cuda:0 is a and cuda:2 is b"):
        devices.same_kind(named, False)
    devices.same_kind(named, True)
    assert "cuda:0 is a and cuda:2 is b: a part" in caplog.text


def test_rates_are_measured_where_kinds_differ(vae, monkeypatch):
    monkeypatch.setattr(devices, "_SIDE", 64)
    assert devices.measured([vae, vae]) == [1.0, 1.0]
    names = iter("aabbaabb")
    monkeypatch.setattr(devices, "kind_of", lambda _: next(names))
    assert max(devices.measured([vae, vae])) == 1.0


def test_weights_are_copied_once(vae, noise):
    one, two, three = copies_on(vae, [CPU, CPU, CPU])
    assert one is vae and two is not three and two.model is vae.model
    assert copies_on(vae, [CPU, CPU])[1] is two
    vae.release()
    assert copies_on(vae, [CPU, CPU])[1] is not two


def test_what_fits_on_none_is_refused(small, noise):
    """As one device refuses it, though only that one has a part."""
    z, end = noise(1, 16, 3, 8, 8), time.monotonic() + 60
    with pytest.raises(PlanError):
        small.decode(z, tiling="untiled", vram_gb=1e-5, devices=TWO, cancel=lambda: time.monotonic() > end)


def test_a_device_without_a_part_takes_over(small, noise, monkeypatch):
    """Two parts for three devices, the second of which fails."""
    monkeypatch.setattr(shares.Leads, "__call__", lambda self, first: 1.0 * bool(first))
    z, end = noise(1, 16, 4, 2, 2), time.monotonic() + 60
    whole = small.decode(z, chunk=2)
    failing = Failing(small, RuntimeError("CUDA error: lost"), 0, once=True)
    monkeypatch.setattr(call, "decode", failing)
    frames = small.decode(z, chunk=2, devices=["cpu"] * 3, cancel=lambda: time.monotonic() > end)
    # The rest is shared by two, in chunks of one latent: some CPUs sum those in another order than chunks of two.
    torch.testing.assert_close(frames, whole, rtol=0, atol=1e-5 * float(whole.std()))
    assert failing.failed


@pytest.mark.parametrize("tile, overlap", [(70, 64), (20, 17)])
def test_tiles_between_latents(small, noise, early, tile, overlap):
    """Rounded down to latents, where one device takes them, too."""
    z, options = noise(1, 16, 5, 3, 11), {"tiling": "blended", "tile": tile, "overlap": overlap, "chunk": 1}
    torch.testing.assert_close(small.decode(z, devices=TWO, **options), small.decode(z, **options))
