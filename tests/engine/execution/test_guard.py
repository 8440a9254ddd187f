"""Out of memory and cancellation at every point of a run: nothing lost, nothing leaked, the VAE reusable."""

import weakref
from contextlib import contextmanager

import pytest
import torch
from zerowaste_vae import Cancelled, PlanError
from zerowaste_vae.engine.execution import fused_pass
from zerowaste_vae.engine.execution.guard import scoped
from zerowaste_vae.engine.execution.staging import StagedReader
from zerowaste_vae.engine.network.plain import Half
from zerowaste_vae.engine.planning.budget import Machine
from zerowaste_vae.engine.runtime import context as run_module
from zerowaste_vae.engine.runtime import handover, parking
from zerowaste_vae.engine.runtime.arena import Arena
from zerowaste_vae.engine.runtime.context import ExecutionContext
from zerowaste_vae.engine.runtime.pressure import Pressure, out_of_memory
from zerowaste_vae.engine.runtime.rings import Ring

from .faults import SIZE, events, fail_calls, inject, leanest, leftovers, record_plans, record_writes

#: Other chunks are other shapes for torch's convolutions on a CPU, so there only as good as fp32.
CHUNKS = {"rtol": 0, "atol": 1.5e-5}


def test_what_counts_as_out_of_memory():
    for error in (
        torch.OutOfMemoryError("x"),
        MemoryError(),
        Pressure(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    ):
        assert out_of_memory(error)
    for error in (RuntimeError("shape mismatch"), ValueError("out of memory"), Cancelled("cancelled")):
        assert not out_of_memory(error)


@pytest.mark.parametrize(("taken", "failing", "contexts"), [(9, False, 3), (9, True, 3), (1, False, 2), (0, False, 0)])
def test_steps_in_a_context(taken, failing, contexts):
    """Steps, their end, and the clean-up of steps broken off run inside; the code that takes a step runs outside."""
    inside, entered = False, 0

    @contextmanager
    def context():
        nonlocal inside, entered
        inside, entered = True, entered + 1
        yield
        inside = False

    def steps():
        try:
            for step in range(2):
                assert inside
                yield step
            if failing:
                raise KeyError
            return "end"
        finally:
            assert inside

    run = scoped(context, steps())
    try:
        for _ in range(taken):
            next(run)
            assert not inside
    except StopIteration as end:
        assert end.value == "end" and not failing
    except KeyError:
        assert failing
    run.close()
    assert entered == contexts


# -- allocations that fail --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_any_allocation_may_fail_once(make_vae, noise, monkeypatch, fused):
    vae, z = make_vae(fused=fused), noise(1, 16, 2, 1, 2)
    expected = vae.decode(z)
    count = 6
    with monkeypatch.context() as patch:
        total = inject(patch)
        vae.decode(z)
    # Evenly spread, the first and the last ones among them.
    for n in sorted({1, 2, total.count, *(1 + i * (total.count - 1) // count for i in range(count))}):
        with monkeypatch.context() as patch:
            inject(patch, [n])
            torch.testing.assert_close(vae.decode(z), expected, **CHUNKS)
        assert vae.last_report.events["oom_step_downs"] + vae.last_report.events["oom_retries"] == 1, n
        assert leftovers() == []
    assert torch.equal(vae.decode(z), expected)
    assert not events(vae)


@pytest.mark.parametrize("fused", [True, False])
def test_encode_survives_too(make_vae, noise, monkeypatch, fused):
    vae, video = make_vae(fused=fused), noise(1, 9, 16, 17, 3).sigmoid()
    expected = vae.encode(video)
    with monkeypatch.context() as patch:
        total = inject(patch)
        vae.encode(video)
    for n in (1, total.count // 3, total.count // 2, total.count - 1):
        with monkeypatch.context() as patch:
            inject(patch, [n])
            torch.testing.assert_close(vae.encode(video), expected, **CHUNKS)
        assert vae.last_report.events["oom_step_downs"] + vae.last_report.events["oom_retries"] == 1, n


@pytest.mark.parametrize("fused", [True, False])
def test_tiles_are_added_once(make_vae, noise, monkeypatch, fused):
    vae, z = make_vae(fused=fused), noise(2, 16, 2, 2, 3)
    options = {"tiling": "blended", "tile": 16, "overlap": 8, "chunk": 1}
    expected = vae.decode(z, **options)
    with monkeypatch.context() as patch:
        total = inject(patch)
        vae.decode(z, **options)
    for share in (0.4, 0.9):
        n = int(share * total.count)
        with monkeypatch.context() as patch:
            # The second one hits the operator's second attempt.
            inject(patch, [n, n + 1])
            torch.testing.assert_close(vae.decode(z, **options), expected, **CHUNKS)
        assert vae.last_report.events["oom_step_downs"] >= 1


def test_operator_retry(make_vae, noise, monkeypatch):
    """An operator that finds no memory is tried again."""
    vae, z = make_vae(), noise(*SIZE)
    expected = vae.decode(z, chunk=1)
    asked = []
    vae.on_pressure = lambda: asked.append(True)
    for name in ("conv3d", "norm_act", "coefficients", "statistics", "to_pixels", "attention"):
        with monkeypatch.context() as patch:
            calls = fail_calls(patch, run_module, name, {3, 5} if name != "statistics" else {2})
            assert torch.equal(vae.decode(z, chunk=1), expected), name
            assert len(calls) > 3
        # Carried to its end where it was: the same bits, nothing run again.
        assert events(vae) == {"oom_retries": len(asked)}
        asked.clear()


def test_handover(make_vae, noise, monkeypatch):
    """The histories go on into a leaner plan, here one that parks them: no chunk is run twice."""
    monkeypatch.setattr(Machine, "host", lambda *_: 1 << 30)
    vae, z = make_vae(), noise(2, 16, 4, 2, 3)
    options = {"chunk": 1}
    expected = vae.decode(z, **options)
    written = record_writes(monkeypatch)
    with monkeypatch.context() as patch:
        # An operator of the second chunk needs a second attempt, and the reserve does not come back.
        fail_calls(patch, run_module, "to_pixels", {4})
        recover = ExecutionContext.recover
        patch.setattr(ExecutionContext, "recover", lambda run: not run.pressed and recover(run))
        plans = record_plans(patch)
        out = vae.decode(z, **options)
    torch.testing.assert_close(out, expected, **CHUNKS)
    assert events(vae) == {"oom_retries": 1, "oom_step_downs": 1}
    assert plans[1].peak_bytes < plans[0].peak_bytes
    assert plans[1].steps.frames < plans[0].steps.frames or plans[1].parking
    assert sorted(written) == [(clip, frame) for clip in range(2) for frame in range(13)]


@pytest.mark.parametrize("room", [True, False])
def test_an_upload_that_fails_hands_over_as_well(make_vae, noise, monkeypatch, room):
    """Unless the host has no room for the histories: then the clip is replayed."""
    if not room:
        monkeypatch.setattr(handover, "available_ram", lambda: 1000)
    vae, z = make_vae(), noise(2, 16, 4, 2, 3)
    expected = vae.decode(z, chunk=1)
    written = record_writes(monkeypatch)
    fail_calls(monkeypatch, StagedReader, "read", {3, 4})  # the third chunk's first and second attempt
    torch.testing.assert_close(vae.decode(z, chunk=1), expected, **CHUNKS)
    trouble = {"oom_retries": 1, "oom_step_downs": 1}
    assert events(vae) == (trouble if room else trouble | {"replayed_chunks": 2})
    assert sorted(written) == [(clip, frame) for clip in range(2) for frame in range(13)]


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_failed_handover(make_vae, noise, monkeypatch, nth):
    """Histories that are missing then would count as what lies before a clip."""
    monkeypatch.setattr(Machine, "host", lambda *_: 1 << 30)
    vae, z, calls = make_vae(), noise(1, 16, 4, 2, 3), []
    expected = vae.decode(z, chunk=1)
    fail_calls(monkeypatch, StagedReader, "read", {3, 4})
    for kind in (Ring, parking.Parked):

        def adopt(self, key, frames, plain=kind.adopt):
            calls.append(key)
            if len(calls) == nth:
                raise torch.OutOfMemoryError("injected")
            plain(self, key, frames)

        monkeypatch.setattr(kind, "adopt", adopt)
    torch.testing.assert_close(vae.decode(z, chunk=1), expected, **CHUNKS)
    assert len(calls) >= nth and vae.last_report.events["oom_step_downs"] == 2


def test_histories_of_no_use_are_not_held(make_vae, noise, monkeypatch):
    """A run that has them in another form begins the clip anew, with the host memory that they took."""
    monkeypatch.setattr(Machine, "host", lambda *_: 1 << 30)
    vae, z, there, alive = make_vae(), noise(1, 16, 5, 2, 3), [], []
    expected = vae.decode(z, chunk=1)
    fail_calls(monkeypatch, StagedReader, "read", {3, 4})

    def refuse(run, left):
        there.extend(map(weakref.ref, left.histories.values()))
        return False

    monkeypatch.setattr(fused_pass, "take_over", refuse)
    out = vae.decode(z, chunk=1, progress=lambda *_: alive.append(sum(h() is not None for h in there)))
    torch.testing.assert_close(out, expected, **CHUNKS)
    assert there and not any(alive)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_replay(make_vae, noise, monkeypatch, fused, chunk):
    """In the middle of a chunk the clip is replayed."""
    vae, z = make_vae(fused=fused), noise(2, 16, 3, 2, 3)
    # The leanest plan there is: it is tried again as it is, and so gives the same bits.
    gib = leanest(vae, z, chunk=1).peak_bytes / 2**30
    options = {"chunk": 1, "vram_gb": gib}
    expected = vae.decode(z, **options)
    written = record_writes(monkeypatch)
    where, name = (run_module, "to_pixels") if fused else (Half, "between")
    per_chunk = len(fail_calls_per_chunk(monkeypatch, vae, z, options, where, name)) // 6
    written.clear()
    # Both attempts of the chunk's first operator fail.
    first = 1 + chunk * per_chunk
    fail_calls(monkeypatch, where, name, {first, first + 1} if fused else {first})
    assert torch.equal(vae.decode(z, **options), expected)
    assert vae.last_report.events["oom_step_downs"] == 1
    assert vae.last_report.events["replayed_chunks"] == chunk
    assert sorted(written) == [(clip, frame) for clip in range(2) for frame in range(9)]


@pytest.mark.parametrize("where", [Arena, Ring, parking.Parked])
def test_memory_that_is_planned_may_not_be_there(make_vae, noise, monkeypatch, where):
    monkeypatch.setattr(Machine, "host", lambda *_: 1 << 30)
    vae, z = make_vae(), noise(*SIZE)
    expected = vae.decode(z)
    gib = 0.0
    if where is parking.Parked:
        gib = leanest(vae, z).peak_bytes / 2**30
        assert leanest(vae, z).parking
    for n in (1, 2):
        with monkeypatch.context() as patch:
            calls = fail_calls(patch, where, "allocate", {n})
            torch.testing.assert_close(vae.decode(z, vram_gb=gib or None), expected, **CHUNKS)
        assert vae.last_report.events["oom_step_downs"] == int(n == 1 or where is Ring), len(calls)
        assert leftovers() == []


@pytest.mark.parametrize("fused", [True, False])
def test_when_nothing_helps_it_says_so(make_vae, noise, monkeypatch, fused):
    vae, z = make_vae(fused=fused), noise(*SIZE)
    expected = vae.decode(z)
    with monkeypatch.context() as patch:
        inject(patch, range(1, 1_000_000))
        with pytest.raises(PlanError, match="out of memory in the smallest steps"):
            vae.decode(z)
        with pytest.raises(PlanError, match="out of memory in the smallest steps"):
            vae.encode(torch.rand(5, 16, 16, 3))
    assert leftovers() == []
    assert torch.equal(vae.decode(z), expected)


def test_other_errors_pass(make_vae, noise, monkeypatch):
    vae, z = make_vae(), noise(*SIZE)

    def broken(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(run_module, "to_pixels", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        vae.decode(z)
    assert not events(vae)


def fail_calls_per_chunk(monkeypatch, vae, z, options, where, name):
    with monkeypatch.context() as patch:
        calls = fail_calls(patch, where, name, ())
        vae.decode(z, **options)
    return calls


# -- cancel -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", [{}, {"tiling": "blended", "tile": 16, "overlap": 8}])
def test_cancel_at_any_chunk(make_vae, noise, fused, options):
    vae, z = make_vae(fused=fused), noise(1, 16, 3, 2, 3)
    seen = []
    expected = vae.decode(z, chunk=1, progress=lambda n, _: seen.append(n), **options)
    for stop in range(len(seen)) if not options else (0, 1, 4, 7):
        done = []
        with pytest.raises(Cancelled):
            vae.decode(z, chunk=1, progress=lambda n, _: done.append(n), cancel=lambda: len(done) >= stop, **options)  # noqa: B023
        assert len(done) == stop
        assert leftovers() == []
    assert torch.equal(vae.decode(z, chunk=1, **options), expected)
