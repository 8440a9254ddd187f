"""Parked histories: every placement, band height and chunking decodes to the same frames."""

import functools
import itertools

import pytest
import torch
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.network.fused import FusedDecoder, FusedEncoder
from zerowaste_vae.engine.network.stream import frame_spans
from zerowaste_vae.engine.runtime import pinned
from zerowaste_vae.engine.runtime.history import Band, History, keep_near, split_rows
from zerowaste_vae.engine.runtime.parking import Parked, Parking
from zerowaste_vae.engine.runtime.pinned import PAGE, POOL, PinnedPool

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    POOL.release()
    assert POOL.nbytes == 0


@pytest.fixture(scope="module")
def model(seed_model):
    model = ARCHITECTURE.build(Config((8, 16, 16, 16), (8, 16, 16, 16), 16, 4)).requires_grad_(False)
    seed_model(model, 3)
    return model


def decode(fused, z, chunk, frames, parking):
    run = fused.plan(chunk, *z.shape[2:], frames, torch.float32, CPU, parking)
    stated = run.nbytes, run.host_bytes
    run.allocate()
    out = []
    parts = z.permute(1, 2, 3, 0).split(chunk)
    for part in parts:
        walk = functools.partial(fused.chunk, run, part, frames, torch.float32)
        run.scout(lambda walk=walk: walk(out.append), part is parts[-1])
        walk(lambda pixels: out.append(pixels.clone()))
    assert not run.parked.coming, "the walk ahead and the walk itself must name the same uses"
    assert (run.nbytes, run.host_bytes) == stated
    run.free()
    return torch.cat(out), stated


@torch.no_grad()
def test_decoder_in_every_placement(model, noise, atol):
    fused = FusedDecoder(model.decoder, torch.float32)
    z = noise(16, 4, 17, 3)  # 136 rows at full size: three bands, the last one of 8 rows
    expected, (resident, none) = decode(fused, z, 4, 0, None)
    assert none == 0
    some = frozenset({"up_blocks.3.resnets.1.conv1", "up_blocks.2.upsamplers.0.conv", "up_blocks.1.upsamplers.0.conv"})
    some = frozenset(f"decoder.{k}" for k in some)
    for parking, chunk, frames in (
        (Parking(None, 1 << 30), 4, 0),
        (Parking(None, 0), 1, 1),
        (Parking(None, 0), 1, 4),
        (Parking(None, 0, near=300_000), 1, 4),
        (Parking(None, 0, buffers=3), 3, 2),
        (Parking(None, 0, rows=100, prefetch=False), 2, 4),
        (Parking(some, 0), 1, 1),
        (Parking(some, 1 << 20, buffers=3), 2, 1),
        (Parking(None, 0, near=500_000), 2, 2),
        (Parking(None, 0, buffers=3, near=1 << 30), 1, 2),
        (Parking(some, 0, buffers=4, near=200_000), 2, 4),
        (Parking(None, 200_000), 3, 3),  # the last chunk has fewer frames: its bands must not grow
    ):
        out, (_, host) = decode(fused, z, chunk, frames, parking)
        torch.testing.assert_close(out, expected, rtol=0, atol=atol)
        assert (host > 0) == (parking.near < 1 << 30)
    # Everything parked, one frame at a time: what stays on the device is a fraction of the histories.
    assert decode(fused, z, 1, 1, Parking(None, 0))[1][0] < 0.6 * decode(fused, z, 1, 1, None)[1][0]
    assert resident > 0


@torch.no_grad()
def test_histories_over_the_ends_of_pieces(model, noise, monkeypatch):
    """Page-locked memory is asked for in pieces, and rows of a history lie in two of them."""
    fused = FusedDecoder(model.decoder, torch.float32)
    z = noise(16, 3, 9, 3)
    expected, (_, host) = decode(fused, z, 1, 1, Parking(None, 0))
    monkeypatch.setattr(pinned, "PIECE", 1 << 10)
    assert host > 20 * pinned.PIECE
    assert torch.equal(decode(fused, z, 1, 1, Parking(None, 0))[0], expected)


@torch.no_grad()
def test_announced_walk(model, noise, atol):
    """One convolution in a ring of its own, all others parked, in steps that are walked once while planned."""
    fused, only = FusedDecoder(model.decoder, torch.float32), "decoder.up_blocks.1.upsamplers.0.conv"
    z = noise(16, 2, 3, 2)
    keys = frozenset(fused.plan(1, 3, 2, 1, torch.float32, CPU).visits) - {only}
    expected, _ = decode(fused, z, 2, 0, None)
    out, _ = decode(fused, z, 2, 2, Parking(keys, 0))  # looks at the bytes stated, too
    torch.testing.assert_close(out, expected, rtol=0, atol=atol)


@torch.no_grad()
def test_encoder_in_bands(model, noise, atol):
    fused = FusedEncoder(model.encoder, torch.float32)
    video = noise(9, 139, 21, 3)

    def encode(chunk, frames, parking):
        run = fused.plan(chunk, 139, 21, frames, CPU, parking)
        run.allocate()
        out = []
        for a, b in frame_spans(9, chunk, 4):
            run.scout(lambda a=a, b=b: fused.chunk(run, video[a:b], frames))
            out.append(fused.chunk(run, video[a:b], frames).clone())
        assert not run.parked.coming
        run.free()
        return torch.cat(out)

    expected = encode(3, 0, None)
    for parking, chunk, frames in ((Parking(None, 0), 1, 1), (Parking(None, 0, rows=64, buffers=3), 2, 3)):
        torch.testing.assert_close(encode(chunk, frames, parking), expected, rtol=0, atol=atol)


@torch.no_grad()
def test_next_clip_starts_afresh(model, noise):
    fused = FusedDecoder(model.decoder, torch.float32)
    run = fused.plan(1, 9, 2, 1, torch.float32, CPU, Parking(None, 0))
    run.allocate()

    def clip(z):
        run.restart()
        out = []
        for part in z.permute(1, 2, 3, 0).split(1):
            fused.chunk(run, part, 1, torch.float32, lambda pixels: out.append(pixels.clone()))
        return torch.cat(out)

    a, b = noise(16, 3, 9, 2), noise(16, 2, 9, 2, seed=1)
    first = clip(a)
    clip(b)
    assert torch.equal(clip(a), first)
    run.free()


@pytest.mark.parametrize(
    ("rows", "step", "reach", "band"), [(200, 1, 3, 64), (64, 1, 3, 64), (70, 2, 4, 64), (5, 1, 2, 64)]
)
def test_rows_of_bands(rows, step, reach, band):
    """Bands store every row once and none before it is read."""
    bands = list(split_rows(rows, step, reach, band))
    assert [b.first for b in bands] == list(range(0, rows, band))
    assert bands[-1].last == rows
    for a, b in itertools.pairwise(bands):
        assert a.last == b.first
        assert a.stored == b.top < a.bottom
    assert bands[-1].stored == bands[-1].bottom == (rows - 1) * step + reach


def history(rows, times=1, work=1, unread=0):
    bands = list(split_rows(rows, 1, 3, 64))
    return History((rows + 2 + unread, 3, 1), 2, torch.float32, bands, times=times, work=work)


@pytest.mark.parametrize("rows", [300, 257, 64, 5])
@pytest.mark.parametrize("near", range(6))
@pytest.mark.parametrize("unread", [0, 1])
def test_every_band_finds_its_rows_in_one_place(rows, near, unread):
    h = history(rows, unread=unread)
    h.near = near = min(near, len(h.bands))
    blocks = torch.zeros(h.near_bytes(near), dtype=torch.uint8), torch.zeros(h.far_bytes, dtype=torch.uint8)
    assert [len(left) for left in h.allocate(*blocks)] == [0, 0]
    assert sum(s.near for s in h.stretches) == near
    shared = 2 * 3 * 2 * 4 * (len(h.stretches) - 1)
    height = rows + 2 + unread
    assert sum(map(len, blocks)) == height * 3 * 2 * 4 + shared
    frame = torch.arange(height * 3.0).view(height, 3, 1)
    for s in h.stretches:
        s.part(1, s.first, s.last).copy_(frame[s.first : s.last])
    for band in h.bands:
        assert torch.equal(h.stretch(band).part(1, band.top, band.bottom), frame[band.top : band.bottom])
    whole = torch.full((2, *frame.shape), torch.nan)
    for piece in h.pieces():
        target = whole[piece.frame, piece.first : piece.first + len(piece.rows)]
        assert target.isnan().all()
        target.copy_(piece.rows)
    assert torch.equal(whole, torch.stack((torch.zeros_like(frame), frame)))


def test_order_of_parking():
    """Histories that travel most for their work stay first."""
    busy, idle, twice = history(300, work=1000), history(300, work=10), history(300, times=2, work=1000)
    all_three = [busy, idle, twice]
    whole = idle.near_bytes(5)
    keep_near(all_three, whole)
    assert [h.near for h in all_three] == [0, 5, 0]
    keep_near(all_three, whole + idle.near_bytes(3))
    assert [h.near for h in all_three] == [0, 5, 3]
    keep_near(all_three, 3 * whole)
    assert sum(h.far_bytes for h in all_three) == 0
    keep_near(all_three, 0)
    assert [h.near for h in all_three] == [0, 0, 0]


def test_unannounced_use():
    """A use nobody announced is fetched all the same."""
    parked = Parked(Parking(None, 0), CPU)
    plane = (6, 3, 1)
    (band,) = parked.bands("a", plane, torch.float32, 2, 1, 4, 1, 3, 1)
    assert band == Band(0, 4, 0, 6, 6)
    parked.note("a", band, 1)
    parked.allocate()
    seen = []
    for frame in range(4):
        buffer = parked.enter("a", band, 1)
        buffer.view[2] = frame
        parked.arrive(buffer, "zero")
        seen.append([int(f[0, 0, 0]) for f in buffer.view])
        parked.leave(buffer)
    assert seen == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3]]
    parked.free()


def test_only_what_is_read_again_travels():
    """One frame of a history that is a clip's first one twice, and nothing when the clip ends with the last use."""
    parked = Parked(Parking(None, 0), CPU)
    (band,) = parked.bands("a", (6, 3, 1), torch.float32, 2, 2, 4, 1, 3, 1)
    parked.note("a", band, 2)
    parked.allocate()
    parked.coming.clear()
    (stretch,) = parked._histories["a"].stretches

    def use(*values):
        buffer = parked.enter("a", band, len(values))
        buffer.view[2:] = torch.tensor(values).view(-1, 1, 1, 1)
        parked.arrive(buffer, "replicate")
        seen = [int(f[0, 0, 0]) for f in buffer.view]
        parked.leave(buffer)
        return seen

    def stored():
        return [int(f[0, 0, 0]) for f in stretch.data]

    stretch.data.fill_(9)
    assert use(1) == [1, 1, 1]
    assert stored() == [1, 9]
    assert [int(piece.rows[0, 0, 0]) for piece in parked.history("a")] == [1, 1]
    assert use(2) == [1, 1, 2]  # both are stored now, though one of them is old
    assert stored() == [1, 2]
    assert use(3) == [1, 2, 3]
    assert stored() == [3, 2]
    for _ in range(2):
        parked.coming.append(("a", band, 1))
    parked.ends = True
    assert use(4) == [2, 3, 4]
    assert stored() == [3, 4]
    assert use(5) == [3, 4, 5]
    assert stored() == [3, 4]
    parked.restart()
    assert use(6, 7) == [6, 6, 6, 7]
    assert stored() == [6, 7]
    parked.ends = True  # of a use that nobody announced, nobody knows that it is the last one
    assert use(8) == [6, 7, 8]
    assert stored() == [8, 7]
    parked.free()


def test_a_clips_first_pass_takes_taller_bands():
    """As many rows of one frame as there is memory for four; their sums are of whole blocks all the same."""
    parked, of = Parked(Parking(None, 0, rows=64), CPU), ("a", (202, 3, 1), torch.float32, 2)
    planned = parked.bands(*of, 4, 200, 1, 3, 1)
    for band in planned:
        parked.note("a", band, 4)
    parked.allocate()
    parked.coming.clear()
    tall = parked.bands(*of, 1, 200, 1, 3, 1, starts=True)
    assert [(b.first, b.last) for b in tall] == [(0, 128), (128, 200)]
    assert parked.bands(*of, 4, 200, 1, 3, 1, starts=True) == planned
    for band in tall:
        buffer = parked.enter("a", band, 1)
        buffer.view[2] = torch.arange(band.top, band.bottom).view(-1, 1, 1)
        parked.arrive(buffer, "replicate")
        parked.leave(buffer)
    whole = torch.full((2, 202, 3, 1), torch.nan)
    for piece in parked.history("a"):
        whole[piece.frame, piece.first : piece.first + len(piece.rows)] = piece.rows
    assert torch.equal(whole, torch.arange(202.0).view(1, -1, 1, 1).expand(2, 202, 3, 1))
    assert parked.bands(*of, 1, 200, 1, 3, 1, starts=True) == planned  # there is a history by now
    parked.free()


def test_refused_allocation():
    """The host's memory comes first, and is nobody's where the device then has none."""
    parked = Parked(Parking(None, 0), CPU)
    (band,) = parked.bands("a", (6, 3, 1), torch.float32, 2, 1, 4, 1, 3, 1)
    parked.note("a", band, 1)
    POOL.release()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parked, "nbytes", property(lambda self: 1 << 60))
        with pytest.raises(RuntimeError):
            parked.allocate()
    assert POOL.nbytes > POOL.idle_bytes
    parked.free()
    assert POOL.nbytes == POOL.idle_bytes > 0
    parked.allocate()
    buffer = parked.enter("a", band, 1)
    assert buffer.view.shape == (3, 6, 3, 1)
    parked.free()
    POOL.release()
    assert POOL.nbytes == 0


def test_pool():
    """Pool uses blocks again and gives them back."""
    pool = PinnedPool()
    a = pool.take(100_000)
    b = pool.take(10)
    pool.give(a)
    assert pool.take(90_000).data_ptr() == a.data_ptr()
    pool.give(a)
    pool.give(b)
    c = pool.take(1_000_000)  # nothing idle is large enough: idle blocks go first
    assert pool.nbytes == c.numel()
    pool.give(c)
    pool.release()
    assert pool.nbytes == 0
    a = pool.take(1_000_000, spare=200_000)
    pool.give(a)
    assert pool.take(1_200_000).data_ptr() == a.data_ptr()
    pool.give(a)
    assert pool.nbytes == a.numel()


@torch.no_grad()
def test_host_memory(model, noise, monkeypatch):
    """A plan with a little less room uses the same host memory."""
    monkeypatch.setattr("zerowaste_vae.engine.runtime.parking.SPARE_SHARE", 2)
    fused, z = FusedDecoder(model.decoder, torch.float32), noise(16, 2, 17, 3)
    decode(fused, z, 1, 2, Parking(None, 0, near=900_000))
    held = POOL.nbytes
    out, (_, host) = decode(fused, z, 1, 2, Parking(None, 0, near=700_000))
    assert POOL.nbytes == held
    first = fused.plan(1, 17, 3, 2, torch.float32, CPU, Parking(None, 0, near=900_000))
    assert first.host_bytes < host
    assert held <= first.host_bytes + PAGE
    assert torch.equal(out, decode(fused, z, 1, 2, Parking(None, 0, near=0))[0])
