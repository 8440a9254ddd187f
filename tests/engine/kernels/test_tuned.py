"""Measured schedules take the table's place in launches, for whole runs, and bands and chunks agree under them."""

import pytest
import torch
from zerowaste_vae.engine.kernels.conv3d import Epilogue, Geometry, conv3d, op, pack_weight, tuned
from zerowaste_vae.engine.kernels.conv3d.schedules import Schedule
from zerowaste_vae.engine.kernels.conv3d.tuned import Kind, held, offer, table, version

CPU = torch.device("cpu")
KIND = Kind("float16", "f32", 16, 32, True, 1, 3, False, True)
OTHER = Schedule(64, 32, 16, 4, 2)


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch):
    for name in ("_tables", "_waiting"):
        monkeypatch.setattr(tuned, name, {})


def test_a_run_ends_with_what_it_began_with():
    first = version(CPU)
    offer(CPU, {KIND: OTHER})
    assert table(CPU) == {KIND: OTHER} and version(CPU) == first + 1
    with held(CPU):
        with held(CPU):
            offer(CPU, {})
            offer(CPU, {KIND: Schedule(128, 32, 16, 4, 2)})
            assert table(CPU) == {KIND: OTHER}
        assert version(CPU) == first + 1
    assert table(CPU)[KIND].positions == 128 and version(CPU) == first + 2
    offer(CPU, dict(table(CPU)))
    assert version(CPU) == first + 2  # the same one
    assert table(torch.device("cuda", 3)) == {}


def test_each_way_to_launch_kernels_has_its_own():
    offer(CPU, {KIND: OTHER}, "A")
    assert table(CPU, "A") == {KIND: OTHER} and table(CPU, "C") == table(CPU) == {}
    with held(CPU):
        offer(CPU, {KIND: OTHER}, "C")
        assert table(CPU, "C") == {}
    assert table(CPU, "C") == table(CPU, "A") and table(CPU) == {}


def test_an_error_ends_a_run_too():
    with pytest.raises(RuntimeError), held(CPU):
        offer(CPU, {KIND: OTHER})
        raise RuntimeError
    assert table(CPU) == {KIND: OTHER}


@pytest.fixture
def case(noise):
    h, w, d = 66, 2, 2
    x = torch.zeros(d + 2, h + 2, w + 2, 16, dtype=torch.float16)
    x[:, 1:-1, 1:-1] = noise(d + 2, h, w, 16)
    weight = pack_weight(noise(32, 16, 3, 3, 3, seed=1) * 0.05, torch.float16)
    residual = noise(d, h, w, 32, seed=2).half()

    def run(slots, rows=(0, h), start=0, frames=d):
        a, b = rows
        out = torch.empty(frames, b - a, w, 32, dtype=torch.float16)
        geometry = Geometry(first_row=a, frame_rows=h)
        part = Epilogue(noise(32, seed=3), residual[:frames, a:b], 8)
        buffer = slots[:, a : b + 2].contiguous()
        sums = conv3d(buffer, weight, out, geometry=geometry, epilogue=part, start=start, backend="triton")
        return out, sums.data

    return x, run


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
def test_equal_bits(case, monkeypatch):
    """A tuned schedule is launched, and bands and chunks give the same bits."""
    pytest.importorskip("triton")
    x, run = case
    usual, _ = run(x)
    offer(CPU, {KIND: OTHER})
    monkeypatch.setattr(op, "pick", None)  # nobody asks the table
    whole, sums = run(x)
    torch.testing.assert_close(whole, usual, rtol=0, atol=4e-3)
    upper, lower = run(x, (0, 64)), run(x, (64, 66))
    assert torch.equal(torch.cat((upper[0], lower[0]), 1), whole)
    assert torch.equal(torch.cat((upper[1], lower[1]), 1), sums)
    ring = torch.cat((x[-1:], x[:-1]))
    first, first_sums = run(ring, start=1, frames=1)
    assert torch.equal(first, whole[:1]) and torch.equal(first_sums, sums[:1])
