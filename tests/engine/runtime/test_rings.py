"""Rings: histories survive any sequence of chunks."""

import pytest
import torch
from zerowaste_vae.engine.runtime.rings import Ring


@pytest.mark.parametrize("rewound", [False, True])
@pytest.mark.parametrize("frames", [4, 5])
@pytest.mark.parametrize("lengths", [[2], [2, 2, 2], [2, 1, 2, 0, 2]])
def test_every_convolution_finds_its_last_frames(lengths, frames, rewound):
    ring = Ring((1, 1, 1), torch.float32)
    for i, length in enumerate(lengths):
        ring.join(str(i), length, frames)
    ring.advance(moved=False)
    assert ring.slots == sum(lengths) + frames
    assert ring.nbytes == 4 * ring.slots
    for clip in range(2):
        ring.restart()
        if ring.data is None:
            ring.allocate(torch.device("cpu"))
        ring.data.fill_(-1)
        seen = {i: [] for i in range(len(lengths))}
        for count in (1, 4, 2, 4, 3, 1, 1, 4):
            for i, length in enumerate(lengths):
                start, slot = ring.place(str(i), count)
                new = [100 * i + 1000 * clip + len(seen[i]) + k for k in range(count)]
                for k, value in enumerate(new):
                    ring.data[(slot + k) % ring.slots] = value
                ring.begin(str(i), "replicate")
                history = [ring.data[(start + k) % ring.slots].item() for k in range(length)]
                before = [(seen[i] or new)[0]] * length + seen[i]
                assert history == before[len(before) - length :]
                seen[i] += new
            ring.advance()
            if rewound:
                ring.rewind()
                assert ring.mark == (0, frozenset(map(str, range(len(lengths)))))
