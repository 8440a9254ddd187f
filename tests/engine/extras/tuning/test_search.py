"""Choose a schedule and drop others. Nothing compiles, launches or looks at a clock."""

import pytest
from zerowaste_vae.engine.errors import Cancelled
from zerowaste_vae.engine.extras.tuning.layers import Layer
from zerowaste_vae.engine.extras.tuning.search import best, search
from zerowaste_vae.engine.kernels.conv3d.schedules import Schedule
from zerowaste_vae.engine.kernels.conv3d.tuned import Kind

TILES = [Schedule(128, 128, 64, warps, stages) for warps in (4, 8) for stages in (3, 4)]


def layer(outputs):
    kind = Kind("float16", "f32", 128, outputs, False, 1, 3, False, True)
    return Layer(kind, 0.5, (3, 3, 3), (1, 1, 1), 0, False, (1, 1, 1), (0, 0), 1, (64, 64), 32, True, False, 1,
                 "float16")  # fmt: skip


class Machine:
    """A clock, a compiler and a timer in one: what each takes is given."""

    def __init__(self, ms, compile_s=1.0, measure_s=1.0, fails=None, wrong=None):
        """ms: of each schedule, or its rounds. fails, wrong: schedule -> why."""
        self.ms, self.each = ms, (compile_s, measure_s)
        self.fails, self.wrong = fails or {}, wrong or {}
        self.now, self.asked, self.ready = 100.0, [], {}

    def __call__(self):
        return self.now

    def start(self, jobs):
        self.jobs = {layer.kind: schedules for layer, schedules in jobs}

    def _spend(self, seconds, until):
        if self.now + seconds > until:
            self.now = until
            return False
        self.now += seconds
        return True

    def wait(self, layer, until):
        schedules = self.jobs[layer.kind]
        ready = self.ready.setdefault(layer.kind, self.now + self.each[0] * len(schedules))
        self.now = max(self.now, min(ready, until))
        if ready > until:
            return None
        return [self.fails.get(s) for s in schedules]

    def measure(self, layer, schedules, until):
        self.asked.append((layer.kind, list(schedules)))
        if not self._spend(self.each[1], until):
            return None
        wrong = [self.wrong.get(s) for s in schedules]
        rounds = [self.ms[s] if isinstance(self.ms[s], list) else [self.ms[s]] * 5 for s in schedules]
        return [[] if why else ms for why, ms in zip(wrong, rounds, strict=True)], wrong


def run(machine, budget=100.0, layers=(256,), schedules=TILES, **options):
    jobs = [(layer(n), list(schedules)) for n in layers]
    machine.start(jobs)
    return search(jobs, machine, machine, machine, budget, **options)


def test_fastest():
    """The fastest schedule is found in every place."""
    for i, fast in enumerate(TILES):
        found = run(Machine({s: 1.0 if s == fast else 2.0 for s in TILES}))
        assert list(found.chosen.values()) == [TILES[i]]
        assert list(found.times.values()) == [(1.0, 1.0 if i == 0 else 2.0)]
        assert not found.dropped and not found.left and not found.broken


def test_noise():
    """A gain within noise does not replace the table's schedule."""
    table = [1.00, 1.02, 0.98, 1.01, 0.99]
    assert best({0: table, 1: [t * 0.985 for t in table]}) == 0  # too little
    assert best({0: table, 1: [0.5, 0.5, 2.0, 2.0, 0.5]}) == 0  # too seldom
    assert best({0: table, 1: [t * 0.97 for t in table]}) == 1
    # A GPU that slows down takes all with it: rounds are compared, not times.
    slower = [1.0, 1.2, 1.4, 1.6, 1.8]
    assert best({0: slower, 1: [t * 0.9 for t in slower]}) == 1
    assert best({0: slower, 1: [t * 1.1 for t in slower], 2: [t * 0.95 for t in slower]}) == 2


def test_never_slower():
    """The choice is never slower than the table's."""
    for slow in (1.0, 1.01, 1.5):
        found = run(Machine({s: 1.0 if s == TILES[0] else slow for s in TILES}))
        assert list(found.chosen.values()) == [TILES[0]]


def test_budget():
    """Layers beyond the budget keep the table's schedule and are named."""
    machine = Machine(dict.fromkeys(TILES, 1.0), compile_s=2.0, measure_s=3.0)  # eleven seconds a layer
    found = run(machine, budget=25.0, layers=(128, 256, 384, 512))
    assert [kind.outputs for kind in found.chosen] == [128, 256]
    assert [kind.outputs for kind in found.left] == [384, 512]
    assert machine.now <= 125.0
    assert [kind.outputs for kind, _ in machine.asked] == [128, 256]


def test_layer_at_the_end():
    """The layer being measured when time runs out keeps the table's."""
    machine = Machine(dict.fromkeys(TILES, 1.0), compile_s=0.0, measure_s=10.0)
    found = run(machine, budget=15.0, layers=(128, 256))
    assert [kind.outputs for kind in found.left] == [256] and machine.now == 115.0


def test_dropped():
    """Wrong and failing schedules are dropped and named."""
    ms = {s: 4.0 - i for i, s in enumerate(TILES)}  # the last is the fastest
    machine = Machine(ms, fails={TILES[1]: "no registers"}, wrong={TILES[3]: "error 0.3 against the reference"})
    found = run(machine)
    (kind,) = found.chosen
    assert found.chosen[kind] == TILES[2]
    assert set(found.dropped) == {(kind, TILES[1], "no registers"), (kind, TILES[3], "error 0.3 against the reference")}
    assert machine.asked == [(kind, [TILES[0], TILES[2], TILES[3]])]


def test_wrong_table():
    """A table's schedule that is wrong here is replaced."""
    found = run(Machine({s: 1.0 + i for i, s in enumerate(TILES)}, wrong={TILES[0]: "does not launch"}))
    assert list(found.chosen.values()) == [TILES[1]]
    assert list(found.times.values()) == [(2.0, None)]


def test_nothing_right():
    """A layer without any right schedule is named."""
    found = run(Machine({}, fails=dict.fromkeys(TILES, "no compiler")))
    assert not found.chosen and [kind.outputs for kind in found.broken] == [256] and len(found.dropped) == len(TILES)


def test_progress_and_cancel():
    seen = []
    run(Machine(dict.fromkeys(TILES, 1.0)), layers=(128, 256), progress=lambda *p: seen.append(p))
    assert seen == [(0, 2), (1, 2), (2, 2)]

    def cancel():
        raise Cancelled

    machine = Machine(dict.fromkeys(TILES, 1.0))
    with pytest.raises(Cancelled):
        run(machine, check=cancel)
    assert not machine.asked

    def later():
        if machine.now > 130:
            raise Cancelled

    machine = Machine(dict.fromkeys(TILES, 1.0), compile_s=500.0)
    with pytest.raises(Cancelled):
        run(machine, budget=3000.0, check=later)
    assert machine.now < 133  # while it compiles, too
