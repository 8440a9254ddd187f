"""Frames and latents as they are finished: the same bits as all at once, and nothing left behind wherever it ends."""

from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae import Cancelled, InputError
from zerowaste_vae.engine.execution.results import HandedOn
from zerowaste_vae.engine.execution.staging import StagedWriter, _Staged
from zerowaste_vae.engine.network.plain import Half
from zerowaste_vae.engine.runtime import context as run_module

from .faults import events, fail_calls, leftovers, record_writes

TILES = {"tiling": "blended", "tile": 16, "overlap": 8}


def video(noise, frames, height=16, width=24):
    return noise(frames, height, width, 3).sigmoid()


def joined(parts, axis):
    parts = list(parts)
    assert all(part.shape[axis] for part in parts)
    return torch.cat(parts, axis)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blended tiles a few results at once, as a long clip has it."""
    few = {"decoder": 5, "encoder": 2}
    monkeypatch.setattr("zerowaste_vae.engine.execution.results.block_of", lambda program: few[program.half])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"output": "uint8", "start": 3, "frames": 7}, TILES, {**TILES, "output": "uint8"}]
)
def test_decode_stream(make_vae, noise, small_blocks, fused, options):
    """The frames of a stream are those of a decode."""
    vae, z = make_vae(fused=fused), noise(1, 16, 5, 2, 3)
    whole, seen = vae.decode(z, chunk=1, **options), []
    parts = list(vae.stream(z, chunk=1, progress=lambda done, total: seen.append((done, total)), **options))
    assert torch.equal(torch.cat(parts, 1), whole)
    assert len(parts) > 2
    assert seen[-1][0] == seen[-1][1] and [n for n, _ in seen] == sorted({n for n, _ in seen})
    assert vae.last_report.complete and vae.last_report.clip[1] == whole.shape[1]


def refilled(pieces):
    """Readers of cameras and videos fill one buffer again and again."""
    buffer = torch.empty_like(pieces[0])
    for piece in pieces:
        yield buffer.copy_(piece)
    buffer.zero_()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_frames_are_copied_when_they_are_taken(make_vae, noise, dtype, size):
    vae, x = make_vae(fused=True), video(noise, 9)
    x = x if dtype == torch.float32 else (255 * x).to(dtype)
    pieces = list(x if size == 1 else x.split(size))
    latents = joined(vae.encode_stream(refilled(pieces), count=9), 2)
    assert torch.equal(latents, vae.encode(x))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", [{}, TILES])
@pytest.mark.parametrize("frames", [1, 11])
def test_encode_stream(make_vae, noise, small_blocks, fused, options, frames):
    """The latents of a stream are those of an encode."""
    vae, x, seen = make_vae(fused=fused), video(noise, frames, 19, 26), []
    whole = vae.encode(x, chunk=1, **options)
    one_by_one = vae.encode_stream(iter(x), chunk=1, progress=lambda n, total: seen.append((n, total)), **options)
    assert torch.equal(joined(one_by_one, 2), whole)
    assert [total for _, total in seen] == [0] * len(seen) and vae.last_report.clip[1] == vae.frames(whole.shape[2])
    seen.clear()
    by_threes = vae.encode_stream(x.split(3), count=frames, chunk=1, progress=lambda *n: seen.append(n), **options)
    assert torch.equal(joined(by_threes, 2), whole)
    assert seen[-1][0] == seen[-1][1] > 0
    seeded = vae.encode_stream(x.split(4), count=frames, chunk=1, seed=3, **options)
    assert torch.equal(joined(seeded, 2), vae.encode(x, chunk=1, seed=3, **options))


def test_chunks_of_more_latents_than_there_are(make_vae, noise):
    vae, x = make_vae(fused=False), video(noise, 6)
    assert torch.equal(joined(vae.encode_stream(iter(x), chunk=4), 2), vae.encode(x, chunk=4))


def test_bytes_are_taken_as_they_are(make_vae, noise):
    vae = make_vae()
    x = video(noise, 9).mul(255).byte()
    assert torch.equal(joined(vae.encode_stream(x.split(2), chunk=1), 2), vae.encode(x, chunk=1))


def test_a_stream_out_of_a_stream(make_vae, noise):
    """Their steps take turns, and what one sets for itself the other does not see."""
    vae, z = make_vae(), noise(1, 16, 4, 2, 2)
    expected = vae.encode(vae.decode(z, chunk=1)[0], chunk=1)
    assert torch.equal(joined(vae.encode_stream(vae.stream(z, chunk=1), chunk=1), 2), expected)


def test_between_frames(make_vae, noise):
    """Between two frames everything is the callers."""
    vae, z = make_vae(fused=False), noise(1, 16, 4, 2, 2)
    vae.options = vae.options.switched(off=["flash_attention"])
    frames = vae.stream(z, chunk=1)
    with torch.enable_grad():
        next(frames)
        x = torch.ones(2, requires_grad=True)
        assert (2 * x).requires_grad
        assert torch.nn.functional.scaled_dot_product_attention(*torch.ones(3, 1, 1, 2, 8)).shape == (1, 1, 2, 8)
        assert not torch._C._len_torch_function_stack()
    # Another call of the same VAE does not wait for it.
    assert vae.decode(z).shape[1] == 13
    assert sum(part.shape[1] for part in frames) == 12


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", [{}, TILES])
def test_a_stream_that_is_dropped_leaves_nothing(make_vae, noise, small_blocks, fused, options):
    vae, z = make_vae(fused=fused), noise(1, 16, 4, 2, 3)
    for end in ("close", "forget", "never begin"):
        frames = vae.stream(z, chunk=1, **options)
        if end != "never begin":
            next(frames)
        if end == "close":
            frames.close()
        del frames
        assert leftovers() == []
        assert not vae._busy.locked()
    latents = vae.encode_stream(iter(video(noise, 13)), chunk=1, **options)
    next(latents)
    latents.close()
    assert leftovers() == [] and not vae._busy.locked()


# -- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_out_of_memory_half_way(make_vae, noise, monkeypatch, fused):
    """Frames that are out stay out, and come once."""
    vae, z = make_vae(fused=fused), noise(1, 16, 5, 2, 3)
    expected = vae.decode(z, chunk=1)
    written = record_writes(monkeypatch)
    frames = vae.stream(z, chunk=1)
    parts = [next(frames)]
    with monkeypatch.context() as patch:
        where, name = (run_module, "to_pixels") if fused else (Half, "between")
        fail_calls(patch, where, name, {2, 3} if fused else {2})
        parts += frames
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1.5e-5)
    assert vae.last_report.events["oom_step_downs"] == 1
    assert sorted(written) == [(0, n) for n in range(17)]


@pytest.fixture
def a_write_later(monkeypatch):
    """Frames reach the host when their buffer is needed again, as behind a GPU."""
    plain, event = StagedWriter.__init__, SimpleNamespace(record=lambda *_: None, query=lambda: True)
    event.synchronize = lambda: None

    def init(self, out, frames, device, finish, ahead=True, given=False):
        plain(self, out, frames, device, finish, ahead)
        self._free = [_Staged(torch.empty(frames, *out.shape, dtype=out.dtype), torch.empty(()), event) for _ in "ab"]
        self._ahead = True

    monkeypatch.setattr(StagedWriter, "__init__", init)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)


@pytest.mark.parametrize("nth", range(1, 5))
def test_no_room_for_frames_on_their_way(make_vae, noise, monkeypatch, a_write_later, nth):
    """None is left out, whichever of them finds no host memory, be it after the last chunk."""
    vae, z = make_vae(), noise(1, 16, 4, 2, 3)
    expected = vae.decode(z, chunk=1)
    fail_calls(monkeypatch, HandedOn, "room", {nth})
    torch.testing.assert_close(joined(vae.stream(z, chunk=1), 1), expected, rtol=0, atol=1.5e-5)
    assert vae.last_report.complete and vae.last_report.events["oom_step_downs"] == 1


def test_out_of_memory_while_frames_come_in(make_vae, noise, monkeypatch):
    """Those that the replay needs are still there, though the caller has none left to give."""
    vae, x = make_vae(), video(noise, 25)
    expected = vae.encode(x, chunk=1)
    latents = vae.encode_stream(iter(x), chunk=1)
    parts = [next(latents), next(latents)]
    fail_calls(monkeypatch, run_module, "conv3d", {5, 6})
    parts += latents
    torch.testing.assert_close(torch.cat(parts, 2), expected, rtol=0, atol=2e-5)
    assert vae.last_report.events["oom_step_downs"] == 1


def test_values_that_overflow_half_way(make_vae, noise):
    vae, z = make_vae("fp16"), noise(1, 16, 4, 2, 2)
    z[:, :, 2:] *= 3e4
    whole = vae.decode(z, chunk=1)
    assert events(vae)["nan_reruns"] == 1
    vae = make_vae("fp16")
    assert torch.equal(joined(vae.stream(z, chunk=1), 1), whole)
    assert vae.last_report.precision == "fp16, then bf16"


def test_cancel_half_way(make_vae, noise):
    vae, z, stop = make_vae(), noise(1, 16, 4, 2, 2), []
    frames = vae.stream(z, chunk=1, cancel=lambda: bool(stop))
    next(frames)
    stop.append(True)
    with pytest.raises(Cancelled):
        list(frames)
    assert leftovers() == [] and not vae._busy.locked()
    assert not vae.last_report.complete


def test_an_error_of_whoever_gives_the_frames(make_vae, noise):
    vae = make_vae()

    def broken():
        yield from video(noise, 7)
        raise OSError("the camera is gone")

    with pytest.raises(OSError, match="the camera is gone"):
        list(vae.encode_stream(broken(), chunk=1))
    assert leftovers() == [] and not vae._busy.locked()


def test_streams_of_something_else(make_vae, noise):
    vae, x = make_vae(), video(noise, 5)
    for frames, says in (
        ([], "the stream of frames is empty"),
        ([torch.rand(2, 5, 16, 16, 3)], "frame 0 of the stream: .* one clip, and this is of 2"),
        ([x[0], x[1, :8]], "frame 1 of the stream is 24x8 in torch.float32, those before are 24x16"),
        ([x[0], x[1].half()], "frame 1 of the stream is 24x16 in torch.float16"),
        ([x[0], x[1] / 0], "frame 1 of the stream: the video holds NaN or Inf"),
        ([x[0, :4]], "frame 0 of the stream: frames of 24x4 are too small"),
    ):
        with pytest.raises(InputError, match=says):
            list(vae.encode_stream(iter(frames)))
    with pytest.raises(InputError, match="ends after 5, and 9 were announced"):
        list(vae.encode_stream(iter(x), count=9))
    with pytest.raises(InputError, match="goes on behind the 4 that were announced"):
        list(vae.encode_stream(iter(x), count=4))
    with pytest.raises(InputError, match="a seed needs the count"):
        vae.encode_stream(iter(x), seed=1)
    with pytest.raises(InputError, match="a stream is of one clip, and the latent holds 2"):
        vae.stream(noise(2, 16, 1, 2, 2))
