"""Rows of frames on several ranks, for which threads stand in: the bits of one."""

import copy
import queue
import threading

import pytest
import torch
from zerowaste_vae.engine.archs import seedvr2, wan
from zerowaste_vae.engine.archs.registry import ARCHITECTURES
from zerowaste_vae.engine.kernels.conv3d import Partials, reference
from zerowaste_vae.engine.network.fused import FusedDecoder, FusedEncoder
from zerowaste_vae.engine.network.rows import row_splits, why_no_rows
from zerowaste_vae.engine.run.rows import RowRun, Rows, Split

CPU, FP16, FP32 = torch.device("cpu"), torch.float16, torch.float32


class Threads:
    """Peers within one process. boxes: by (from, to)."""

    def __init__(self, rank, count, boxes):
        self.rank, self.count, self.boxes, self.told = rank, count, boxes, 0

    def exchange(self, given, wanted):
        self.told += 1
        for peer, tensor in given:
            self.boxes[self.rank, peer].put(tensor.clone())
        for peer, tensor in wanted:
            got = self.boxes[peer, self.rank].get(timeout=60)
            assert tensor.is_contiguous() and got.shape == tensor.shape and got.dtype == tensor.dtype
            tensor.copy_(got)

    def stacked(self, own):
        others = [r for r in range(self.count) if r != self.rank]
        out = torch.stack([own] * self.count)
        self.exchange([(r, own) for r in others], [(r, out[r]) for r in others])
        return out


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Sums whose order is not seen, of products with few bits: torch's convolutions on a CPU choose theirs by the size
    of the whole."""
    convolve = torch.nn.functional.conv3d

    def exact(x, w, *args, **options):
        return convolve(x.double(), w.bfloat16().double(), *args, **options)

    monkeypatch.setattr(reference.F, "conv3d", exact)
    # Where vectors end is seen, too: lines of frames are multiples of them, and no thread begins within one.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def decode(fused, z, chunk, rows=None):
    """A clip's latents [C, T, h, w] to its frames, of ranks on the first one, and the bytes of the run."""
    run = fused.plan(min(chunk, z.shape[1]), *z.shape[2:], 0, torch.float32, CPU, rows=rows)
    return through(run, z.permute(1, 2, 3, 0).split(chunk), lambda part, emit: fused.chunk(
        run, part, 0, torch.float32, emit))  # fmt: skip


def encode(fused, video, chunk, rows=None):
    """A clip's frames [F, H, W, 3], of which this rank reads its rows, to its moments; as `decode`."""
    run, of = fused.plan(chunk, *video.shape[1:3], 2, CPU, rows=rows), fused.every
    video = video if rows is None else video[:, slice(*rows.read())]
    first = 1 + of * (chunk - 1)
    parts = [video[:first], *video[first:].split(of * chunk)]
    return through(run, parts, lambda part, emit: emit(fused.chunk(run, part, 2)))


def through(run, parts, step):
    stated = run.nbytes
    run.allocate()
    assert run.nbytes == stated
    out = []
    for part in parts:
        step(part, lambda made: out.append(made.clone()))
    return torch.cat(out), stated


def shared(work, program, height, count):
    """Of each rank: what `work(rows)` gives, and how often it has told the others something."""
    boxes = {(a, b): queue.Queue() for a in range(count) for b in range(count)}
    parts, errors = [None] * count, []

    def of(rank):
        try:
            with torch.no_grad():
                peers = Threads(rank, count, boxes)
                parts[rank] = *work(Rows(peers, row_splits(program, height, count))), peers.told
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=of, args=(r,)) for r in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return parts


FAMILIES = {
    "seedvr2": seedvr2.ARCHITECTURE.build(seedvr2.Config((16, 16, 32, 32), (8, 16, 16, 16), 16, 4)),
    "wan2.1": wan.WAN21.build(wan.Config((16, 16, 32, 32), (16, 32, 32, 32), 4)),
    "wan2.2": wan.WAN22.build(wan.Config((16, 16, 32, 32), (16, 16, 32, 32), 6, 2)),
}


@pytest.fixture
def half(family, seed_model):
    """Of a small network of the family, in a type."""

    def made(name, dtype):
        model = copy.deepcopy(FAMILIES[family]).requires_grad_(False)
        seed_model(model, 3)
        return getattr(model, name).to(dtype)

    return made


@torch.no_grad()
@pytest.mark.parametrize("family, count, h, w, dtype", [
    ("seedvr2", 2, 35, 3, FP16), ("seedvr2", 3, 50, 1, FP32), ("wan2.1", 2, 35, 2, FP32), ("wan2.1", 3, 51, 1, FP16),
    ("wan2.2", 2, 33, 2, FP16)])  # fmt: skip
def test_decoder(noise, half, count, h, w, dtype):
    decoder = half("decoder", dtype)
    fused, z = FusedDecoder(decoder, dtype), noise(decoder.program.takes, 3, h, w)
    whole, size = decode(fused, z, 2)
    ranks = shared(lambda rows: decode(fused, z, 2, rows), decoder.program, h, count)
    assert torch.equal(ranks[0][0], whole)
    assert all(own < size and told > 0 for _, own, told in ranks)


@torch.no_grad()
@pytest.mark.parametrize("family, wanted", [("seedvr2", {("group", 0)}), ("wan2.1", {("l2", 1)})])
def test_border_rows_travel_with_the_sums_of_their_norm(monkeypatch, noise, half, wanted):
    """An exchange takes longer than what it carries."""
    edges, told = RowRun.edges, set()

    def counted(run, data, slot, count, x=None, *normed):
        before = getattr(run._peers, "told", 0)
        edges(run, data, slot, count, x, *normed)
        if not (run.dry or run._now.whole) and normed and normed[0].kind != "none":
            told.add((normed[0].kind, run._peers.told - before))

    monkeypatch.setattr(RowRun, "edges", counted)
    decoder = half("decoder", FP16)
    fused, z = FusedDecoder(decoder, FP16), noise(decoder.program.takes, 2, 35, 2)
    shared(lambda rows: decode(fused, z, 1, rows), decoder.program, 35, 2)
    assert told == wanted


@torch.no_grad()
@pytest.mark.parametrize("family, count, h, w, dtype", [
    ("seedvr2", 2, 691, 16, FP16), ("wan2.1", 2, 152, 16, FP32), ("wan2.1", 3, 203, 16, FP16),
    ("wan2.2", 2, 272, 32, FP16)])  # fmt: skip
def test_encoder(noise, half, count, h, w, dtype):
    encoder = half("encoder", dtype)
    fused, video = FusedEncoder(encoder, dtype), noise(9, h, w, 3)
    whole, size = encode(fused, video, 2)
    ranks = shared(lambda rows: encode(fused, video, 2, rows), encoder.program, h, count)
    assert torch.equal(ranks[0][0], whole)
    assert all(own < size and told > 0 for _, own, told in ranks)


def test_convolutions_may_have_as_many_blocks_of_sums_on_one_rank_only():
    """Of other tiles, on a GPU: ranks tell each other how many for each of them, or all of them do not."""
    blocks = {0: (5, 5, 5), 1: (5, 6, 6)}

    def work(rows):
        run = RowRun.__new__(RowRun)
        run._peers, run._blocks = rows.peers, {}
        split, rank = rows.splits[-1], rows.peers.rank
        sums = [torch.full((2, n, 4, 2), 10.0 * i + rank) for i, n in enumerate(blocks[rank])]
        for again in range(2):
            made = [run._all(Partials(s, 8), split, i).data for i, s in enumerate(sums)]
            assert [m.shape[1] for m in made] == [10, 11, 11], again
        return made, run

    program = next(p for p in seedvr2.ARCHITECTURE.programs(seedvr2.PUBLISHED.config) if p.half == "decoder")
    first, second = shared(work, program, 90, 2)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert first[2] == second[2] == 3 + 2 * 3
    run, split = second[1], next(iter(second[1]._blocks))[0]
    with pytest.raises(ValueError, match="5 blocks of sums where there were 6"):
        run._all(Partials(torch.zeros(2, 5, 4, 2), 8), split, 1)


def test_splits_begin_with_blocks():
    assert Split.of(180, 2).edges == (0, 96, 180) and Split.of(720, 2).edges == (0, 352, 720)
    assert Split.of(90, 2, 16).edges == (0, 48, 90) and Split.of(90, 2, 16).blocks(1) == (32, 90)
    assert Split.of(90, 2).edges == (0, 32, 90) and Split.of(32, 2).whole


def test_splits_at_other_resolutions():
    split = Split.of(1043, 2, 512)
    assert split.edges == (0, 512, 1043)
    assert split.at(1, 132).edges == split.at(0, 128).edges == (0, 128, 260)
    assert Split.of(90, 2).at(1, 116).edges == (0, 64, 180)


def test_without_sums_parts_are_equal():
    """Nothing but those asks for whole blocks of rows."""
    (decoder,) = (p for p in wan.WAN21.programs(wan.WAN21.published.config) if p.half == "decoder")
    assert [s.edges for s in row_splits(decoder, 90, 2)] == [(0, 90), (0, 44, 90), (0, 88, 180), (0, 180, 360)]


def test_which_published_networks_have_rows():
    """The others say which of their steps has none, or why the network has not."""
    have = {}
    for architecture in ARCHITECTURES:
        for program in architecture.programs(architecture.published.config):
            height = 1088 if program.half == "encoder" else 1088 // architecture.spatial
            have[architecture.name, program.half] = why_no_rows(program, height, 2)
    assert {name for name, why in have.items() if why is None} == {
        (name, half) for name in ("seedvr2", "wan2.1", "wan2.2") for half in ("encoder", "decoder")
    }
    assert all("does not make rows of a frame" in why or "are not split" in why for why in have.values() if why)
