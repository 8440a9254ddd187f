"""Arena and rings: what they hand out, and that histories survive any sequence of chunks."""

import pytest
import torch
from zerowaste_vae.engine.run.arena import ALIGN, Arena, Ring


def test_arena_learns_its_size_and_then_hands_out_the_same_places():
    def program(arena):
        a = arena.take((3, 5), torch.float32)
        with arena.scope():
            b = arena.take((100,), torch.float16)
            with arena.scope():
                arena.take((1000,), torch.uint8)
        c = arena.take((7,), torch.float32)
        return a, b, c

    arena = Arena()
    assert all(t.device.type == "meta" for t in program(arena))
    assert arena.peak == 4 * ALIGN  # 60 and 200 bytes take one unit each, 1000 take two
    arena = Arena()
    with arena.scope():
        program(arena)
    arena.allocate(torch.device("cpu"))
    a, b, c = program(arena)
    a.fill_(1)
    c.fill_(2)
    assert a.shape == (3, 5)
    assert a.eq(1).all()
    # b's scope was over when c was taken: the memory is the same.
    assert b.data_ptr() == c.data_ptr()


@pytest.mark.parametrize("rewound", [False, True])
@pytest.mark.parametrize("frames", [4, 5])
@pytest.mark.parametrize("halos", [[2], [2, 2, 2], [2, 1, 2, 0, 2]])
def test_every_convolution_finds_its_last_frames(halos, frames, rewound):
    ring = Ring((1, 1, 1), torch.float32)
    for i, halo in enumerate(halos):
        ring.join(str(i), halo, frames)
    ring.advance(moved=False)
    assert ring.slots == sum(halos) + frames
    assert ring.nbytes == 4 * ring.slots
    for clip in range(2):
        ring.restart()
        if ring.data is None:
            ring.allocate(torch.device("cpu"))
        ring.data.fill_(-1)
        seen = {i: [] for i in range(len(halos))}
        for count in (1, 4, 2, 4, 3, 1, 1, 4):
            for i, halo in enumerate(halos):
                start, slot = ring.place(str(i), count)
                new = [100 * i + 1000 * clip + len(seen[i]) + k for k in range(count)]
                for k, value in enumerate(new):
                    ring.data[(slot + k) % ring.slots] = value
                ring.begin(str(i), "replicate")
                history = [ring.data[(start + k) % ring.slots].item() for k in range(halo)]
                before = [(seen[i] or new)[0]] * halo + seen[i]
                assert history == before[len(before) - halo :]
                seen[i] += new
            ring.advance()
            if rewound:
                ring.rewind()
                assert ring.mark == (0, frozenset(map(str, range(len(halos)))))
