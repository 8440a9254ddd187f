"""The arena hands out what it was sized for."""

import torch
from zerowaste_vae.engine.runtime.arena import ALIGN, Arena


def test_places():
    """Arena learns its size and then hands out the same places."""
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


def test_restart_overlap():
    """After a restart, memory lies over what was there, at either end."""
    def program(arena):
        pairs, tops = [], arena.tops
        for _ in range(2):
            arena.turn(tops)
            small = arena.take((ALIGN,), torch.uint8)
            arena.restart(tops)
            pairs.append((small, arena.take((3 * ALIGN,), torch.uint8)))
        return pairs

    arena = Arena()
    with arena.scope():
        program(arena)
    assert arena.peak == 4 * ALIGN  # a large one and, at the other end, the second small one
    arena.allocate(torch.device("cpu"))
    ends = [(small.data_ptr() - large.data_ptr()) // ALIGN for small, large in program(arena)]
    assert sorted(ends) == [0, 2]
