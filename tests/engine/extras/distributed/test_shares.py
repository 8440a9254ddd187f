"""Shares of a clip: nothing left out, nobody waits long for another, the lead counted."""

import pytest
from zerowaste_vae.engine.extras.distributed.shares import Leads, Share, duration, in_rounds, split
from zerowaste_vae.engine.families import seedvr2, wan
from zerowaste_vae.engine.network.program import Program

WIDTHS = (128, 256, 512, 512)


@pytest.fixture(scope="module")
def leads():
    return Leads(seedvr2.decoder(seedvr2.Config(WIDTHS, WIDTHS)), 90, 160)


def covered(shares, first, last):
    assert [s.first for s in shares] == [first, *(s.end for s in shares[:-1])] and shares[-1].end == last
    assert len({s.device for s in shares}) == len(shares)


def test_the_lead_is_staged(leads):
    """Full resolution sees four latents before a border, the front all that a result depends on."""
    assert leads(100) == leads(60)
    begins = seedvr2.decoder(seedvr2.Config(WIDTHS, WIDTHS)).begins(397)
    assert 5 < leads(100) < 10 < 100 - begins[0]
    assert leads(2) <= 2 and leads(20) < leads(60)


def test_a_clips_first_latent_is_one_frame(leads):
    """All but the front makes four frames of others: the first share has less to do than it has latents."""
    assert -0.75 < leads(0) < -0.6
    first, second = split(leads, 41, [1.0, 1.0])
    assert first.lead == leads(0) and second.lead == leads(second.first) > 0


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("latents", [6, 21, 41, 150])
def test_all_are_done_together(leads, count, latents):
    rates = [1.0] * count
    shares = split(leads, latents, rates)
    covered(shares, 0, latents)
    times = [s.end - s.first + s.lead for s in shares]
    if len(shares) == count:
        assert max(times) - min(times[:-1]) < 1.2
    assert duration(shares, rates) <= latents
    assert duration(shares, rates) == pytest.approx(max(times))


def test_a_faster_device_gets_more(leads):
    even, uneven = split(leads, 100, [1, 1]), split(leads, 100, [1, 3])
    assert uneven[0].end < even[0].end
    assert abs((uneven[0].end) / 1 - (100 - uneven[0].end + uneven[1].lead) / 3) < 1.5
    assert split(leads, 10, [1, 50]) == [Share(1, 0, 10, leads(0))]


def test_more_clips_than_devices_need_no_lead(leads):
    shares = split(leads, 5, [1, 1], clips=4)
    assert shares == [Share(0, 0, 10, leads(0)), Share(1, 10, 20, leads(0))]
    assert shares[1].parts(5) == [(2, 0, 5), (3, 0, 5)]
    assert Share(0, 3, 12, 0).parts(5) == [(0, 3, 5), (1, 0, 5), (2, 0, 2)]


def test_bounds(leads):
    """Shares begin with chunks and stay within bounds."""
    shares = split(leads, 90, [1, 1, 1], step=4)
    covered(shares, 0, 90)
    assert all(s.first % 4 == 0 for s in shares)
    covered(split(leads, 90, [1, 1], bounds=(50, 81)), 50, 81)


def test_whole_clip(monkeypatch):
    """Steps that depend on the whole clip are not shared."""
    program = wan.decoder(wan.Config((8, 8, 8, 8), (8, 8, 8, 8)))
    monkeypatch.setattr(Program, "begins", lambda self, first: (0,) * len(self.steps))
    assert len(split(Leads(program, 8, 8), 30, [1, 1])) == 1


@pytest.mark.parametrize("rates", [[1.0, 1.0], [1.0, 0.25], [1.0, 1.0, 0.5]], ids=str)
@pytest.mark.parametrize("step", [1, 4, 5, 8])
def test_rounds_wait_in_the_room_there_is(rates, step):
    def leads(first):
        return 0.5 * (first > 0)

    leads.tail = 0.0
    window, shared = 2 * len(rates) - 1, 0
    for room in range(0, 90, 4):
        for latents in (40, 97, 200):
            shares = in_rounds(leads, latents, rates, step, (3, latents), room, window)
            assert [s.first for s in shares] == [3, *(s.end for s in shares[:-1])] and shares[-1].end == latents
            held = max(sum(s.end - s.first for s in shares[i : i + window]) for i in range(len(shares)))
            assert held <= room or len(shares) == 1
            shared += len({s.device for s in shares}) > 1
    assert shared
