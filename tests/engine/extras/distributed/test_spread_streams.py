"""Streams on several devices: in order, later segments made meanwhile, and no more in memory than there is room for."""

import threading
import time

import pytest
import torch
from zerowaste_vae import Cancelled, InputError, load
from zerowaste_vae.engine.execution import call
from zerowaste_vae.engine.execution.results import HandedOn
from zerowaste_vae.engine.extras.distributed.parts import DONE
from zerowaste_vae.engine.extras.distributed.spread import Spread

from .trouble import Failing, overflows

TWO = ["cpu", "cpu"]


@pytest.fixture
def rounds(monkeypatch):
    """Room for so many latents of each device; leads as `early` has them."""

    def room(latents, frame):
        monkeypatch.setattr("zerowaste_vae.engine.execution.results.waiting_room", lambda _: latents * 4 * 3 * frame)

    return room


@pytest.fixture
def stopped(monkeypatch):
    """Frames that are made when nothing more is."""
    landed, land = [], HandedOn.land
    monkeypatch.setattr(HandedOn, "land", lambda self, *of: (landed.append(len(of[2])), land(self, *of)))

    def count():
        before = -1
        while before < len(landed):
            before = len(landed)
            time.sleep(0.5)
        return sum(landed)

    return count


@pytest.mark.parametrize("count, fused", [(2, True), (3, False)])
def test_order(small, noise, early, rounds, count):
    """A stream is in order while later segments are made."""
    z = noise(1, 16, 12, 2, 3)
    whole, frame = small.decode(z, chunk=1), 16 * 24 * 3 * 4
    rounds(2 * (2 * count - 1) / 3, frame)
    pieces = list(small.stream(z, chunk=1, devices=["cpu"] * count))
    assert torch.equal(torch.cat(pieces, 1), whole) and len(pieces) >= 12
    parts = small.last_report.parts
    assert small.last_report.complete and len(parts) >= 5
    assert [r.start for r, _ in parts] == [0, *(r.stop for r, _ in parts[:-1])]
    n = 2 * count - 1
    held = max(parts[min(i + n, len(parts)) - 1][0].stop - parts[i][0].start for i in range(len(parts)))
    assert f"at most {held} frames waiting" in small.last_report.plan and held < 45


@pytest.mark.parametrize("late", [False, True])
def test_bounded_queue(small, noise, early, rounds, stopped, monkeypatch, late):
    """Nor does a part whose last results are being taken make room for another one."""
    z, read = noise(1, 16, 16, 1, 2), Spread._read
    rounds(2, 8 * 16 * 3 * 4)

    def after_the_first_part(spread):
        read(spread)
        while late and spread.parts[0].state != DONE and spread.feed.has(spread.parts[0].first, spread.parts[0].end):
            time.sleep(0.01)

    monkeypatch.setattr(Spread, "_read", after_the_first_part)
    stream = small.stream(z, chunk=1, devices=TWO)
    next(stream)
    assert 1 < stopped() <= 3 * 8 + 1 < 61
    stream.close()
    assert not any(t.name.startswith("zerowaste") for t in threading.enumerate())
    assert torch.equal(small.decode(z, chunk=1), torch.cat(list(small.stream(z, chunk=1, devices=TWO)), 1))


@pytest.mark.parametrize("after", [0, 3])
def test_a_stream_goes_on_where_one_fails(small, noise, early, rounds, monkeypatch, after):
    z = noise(1, 16, 12, 2, 2)
    whole = small.decode(z, chunk=1)
    monkeypatch.setattr(call, "decode", Failing(small, RuntimeError("CUDA error: lost"), after))
    rounds(2, 16 * 16 * 3 * 4)
    assert torch.equal(torch.cat(list(small.stream(z, chunk=1, devices=TWO)), 1), whole)
    assert small.last_report.events["handed_over"] == 1


@pytest.mark.parametrize("room", [1, 2])
def test_one_device(small, noise, rounds, stopped, room):
    """Leads would take longer than is saved, or there is no room for rounds."""
    z = noise(1, 16, 40, 2, 2)
    rounds(room, 16 * 16 * 3 * 4)
    stream = small.stream(z, chunk=1, devices=TWO)
    first = next(stream)
    assert stopped() < 20
    assert torch.equal(torch.cat([first, *stream], 1), small.decode(z, chunk=1))


@pytest.mark.parametrize("room", [3, 6, 10])
def test_room(small, noise, early, rounds, stopped, room):
    """Chunks are not more than there is room for."""
    rounds(room, 16 * 16 * 3 * 4)
    stream = small.stream(noise(1, 16, 60, 2, 2), chunk=5, devices=TWO)
    next(stream)
    assert 1 <= stopped() <= 12 * room
    stream.close()


def test_streams_that_overlap_leave_nothing(small, noise, early):
    own, z = lambda: None, noise(1, 16, 12, 2, 2)
    small.on_pressure = own
    one, two = (small.stream(z, chunk=1, devices=TWO) for _ in range(2))
    next(one), next(two)
    one.close()
    two.close()
    assert small.on_pressure is own


def test_decode_during_stream(small, noise, early, rounds, monkeypatch):
    """The stream's own devices ask by way of this thread, which would wait for itself."""
    asked, made, failed, z = [], call.clip.decode, [], noise(1, 16, 12, 2, 2)
    small.on_pressure = lambda: asked.append(threading.current_thread())
    rounds(2, 16 * 16 * 3 * 4)
    stream = small.stream(z, chunk=1, devices=TWO)
    next(stream)

    def once(*of):
        if threading.current_thread() is threading.main_thread() and not failed:
            failed.append(0)
            raise torch.OutOfMemoryError("CUDA out of memory")
        yield from made(*of)

    monkeypatch.setattr(call.clip, "decode", once)
    monkeypatch.setattr(Spread, "_ask", lambda self: pytest.fail("of another call"))
    small.decode(z, chunk=1)
    stream.close()
    assert asked == [threading.main_thread()]


def test_callbacks(small, noise, early, rounds, monkeypatch):
    """Devices of a stream ask by way of the caller."""
    asked, made, failed, z = [], call.clip.decode, [], noise(1, 16, 12, 2, 2)
    small.on_pressure = lambda: asked.append(threading.current_thread())
    rounds(2, 16 * 16 * 3 * 4)

    def once(half, latents, plan, results, guard, wanted):
        if not wanted.start and not failed:
            failed.append(0)
            raise torch.OutOfMemoryError("CUDA out of memory")
        yield from made(half, latents, plan, results, guard, wanted)

    whole = small.decode(z, chunk=1)
    monkeypatch.setattr(call.clip, "decode", once)
    assert torch.equal(torch.cat(list(small.stream(z, chunk=1, devices=TWO)), 1), whole)
    assert asked == [threading.main_thread()]


def test_cancelling_a_stream_stops_all(small, noise, early):
    z, told = noise(1, 16, 9, 2, 3), []
    with pytest.raises(Cancelled):
        list(small.stream(z, chunk=1, devices=TWO, progress=lambda *at: told.append(at), cancel=lambda: bool(told)))
    assert not any(t.name.startswith("zerowaste") for t in threading.enumerate())


def test_a_stream_follows_into_a_wider_type(make_vae_file, noise, early, rounds, monkeypatch):
    """Results that later segments have by then are made again before anybody sees them."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: "off")
    vae = load(make_vae_file((8, 8, 8, 8), (8, 8, 8, 8), 2, 3), precision="fp16", device="cpu")
    z = noise(1, 16, 12, 2, 2)
    narrow, wide = vae.decode(z, chunk=1), vae._safer("").decode(z, chunk=1)
    overflows(monkeypatch, lambda start, done: not start and done > 0)
    rounds(2, 16 * 16 * 3 * 4)
    out = torch.cat(list(vae.stream(z, chunk=1, devices=TWO)), 1)
    kept = next(n for n in range(45) if not torch.equal(out[:, n], narrow[:, n]))
    assert 0 < kept < vae.last_report.parts[0][0].stop and torch.equal(out[:, kept:], wide[:, kept:])


@pytest.mark.parametrize("fused", [True, False])
def test_frames_that_come_one_by_one_are_shared(small, noise, early, rounds):
    """Taken by the caller's thread, a window of parts ahead at most, and let go behind it."""
    video, read, seen = noise(61, 16, 16, 3).sigmoid(), [], []
    rounds(2.1, 16 * 16 * 3 * 4)

    def frames():
        for at, frame in enumerate(video):
            assert threading.current_thread() is threading.main_thread()
            read.append(at)
            yield frame

    options = {"chunk": 1, "count": 61, "seed": 3}
    for piece in small.encode_stream(frames(), devices=TWO, **options):
        seen.append((piece, len(read)))
    assert len(small.last_report.parts) > 4 and small.last_report.complete
    assert "latents waiting" in small.last_report.plan
    assert torch.equal(torch.cat([p for p, _ in seen], 2), small.encode(video, chunk=1, seed=3))
    assert seen[0][1] < 40 and read == list(range(61))
    with pytest.raises(InputError, match="count of all frames"):
        small.encode_stream(iter(video), devices=TWO)


def test_one_device_memory(small, noise):
    """Leads would take longer than is saved."""
    video, read = noise(33, 16, 16, 3).sigmoid(), []
    stream = small.encode_stream((read.append(0) or f for f in video), chunk=1, count=33, devices=TWO)
    first = next(stream)
    assert len(read) < 20
    assert torch.equal(torch.cat([first, *stream], 2), small.encode(video, chunk=1))


def test_failing_device(small, noise, early, rounds, monkeypatch):
    """A stream of frames goes on where one fails."""
    video, made = noise(61, 16, 16, 3).sigmoid(), call.encode
    whole = small.encode(video, chunk=1)

    def failing(core, frames, request, tick, results, wanted, *rest):
        if core is small:
            yield from made(core, frames, request, tick, results, wanted, *rest)
            return
        yield from made(core, frames, request, tick, results, range(wanted.start, wanted.start + 1), *rest)
        raise RuntimeError("CUDA error: lost")

    monkeypatch.setattr(call, "encode", failing)
    rounds(2.1, 16 * 16 * 3 * 4)
    found = torch.cat(list(small.encode_stream(iter(video), chunk=1, count=61, devices=TWO)), 2)
    assert torch.equal(found, whole) and small.last_report.events["handed_over"] == 1
