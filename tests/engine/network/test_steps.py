"""Parts of a clip: each step sees as little of what lies before them as its later steps allow."""

import math

import pytest
import torch
from zerowaste_vae.engine.execution import clip
from zerowaste_vae.engine.families import cosmos, seedvr2, wan
from zerowaste_vae.engine.network.program import Program
from zerowaste_vae.engine.network.state import Place, State
from zerowaste_vae.engine.network.steps import Steps, chunk_end, frames_of, with_chunks
from zerowaste_vae.engine.planning.fused_plans import FusedPlans
from zerowaste_vae.engine.runtime.context import ExecutionContext
from zerowaste_vae.engine.runtime.parking import Parking
from zerowaste_vae.engine.vae import VideoVAE

T = 42
WIDTHS = (8, 8, 8, 8)


@pytest.fixture(scope="module", params=["seedvr2", "wan2.2"])
def parts(request, seed_model):
    """A VAE on the fused operators' references, a latent of one pixel and its frames."""
    if request.param == "seedvr2":
        architecture, config = seedvr2.ARCHITECTURE, seedvr2.Config(WIDTHS, WIDTHS, norm_groups=2)
    else:
        architecture, config = wan.WAN22, wan.Config(WIDTHS, WIDTHS, 48, 2)
    model = architecture.build(config).requires_grad_(False)
    seed_model(model, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
        vae = VideoVAE(model, architecture, "fp32", torch.float32, torch.device("cpu"))
        z = torch.randn(1, config.latent_channels, T, 1, 1, generator=torch.Generator().manual_seed(1))
        yield vae, z, vae.decode(z, chunk=1)


def test_steps_begin_where_later_ones_need_them(parts, monkeypatch):
    """The first convolution takes all latents of the window, the last one only those of its own two frames."""
    vae, z, whole = parts
    program, seen = vae.model.decoder.program, {}
    inputs = ExecutionContext.inputs

    def counted(self, conv, x, *args, **options):
        if not self.dry:
            seen[conv.key] = seen.get(conv.key, 0) + x.shape[0]
        return inputs(self, conv, x, *args, **options)

    monkeypatch.setattr(ExecutionContext, "inputs", counted)
    begins = program.begins(4 * T - 7)
    part = vae.decode(z, chunk=1, start=4 * T - 7, frames=4)
    assert torch.equal(part, whole[:, -4:])
    assert list(begins) == sorted(begins) and begins[0] < T - 20 and begins[-1] == T - 2
    keys = [key for key in seen if "conv_in" in key or key.endswith("decoder.conv1")]
    assert [seen[key] for key in keys] == [T - begins[0]]
    last = [key for key in seen if key.endswith(("conv_out", "head.2"))] or [None]
    assert seen.get(last[0], 8) == 8  # of latents T - 2 and T - 1


def test_a_smaller_lead_gives_other_bits(parts, monkeypatch):
    vae, z, whole = parts
    first = 4 * (T - 2) + 1
    begins = vae.model.decoder.program.begins(first)
    # What the first frames of the front mean to the last ones is less than fp32 shows: half of its lead.
    for late in ((*begins[:-1], begins[-1] + 1), tuple(max(b, (begins[0] + T) // 2) for b in begins)):
        monkeypatch.setattr(Program, "begins", lambda self, first, late=late: late)
        vae.release()
        part = vae.decode(z, chunk=1, start=first, frames=4)
        assert not torch.equal(part, whole[:, first : first + 4])
    monkeypatch.undo()
    vae.release()


@pytest.mark.parametrize("parking", [Parking(None, 0), Parking(None, 0, buffers=3, prefetch=False)])
def test_histories_may_be_parked(parts, parking, monkeypatch):
    vae, z, whole = parts
    plan = FusedPlans._plan
    monkeypatch.setattr(FusedPlans, "_plan", lambda self, *ask: plan(self, *ask[:3], parking))
    assert torch.equal(vae.decode(z, chunk=1, start=4 * T - 8, frames=3), whole[:, 4 * T - 8 : 4 * T - 5])
    assert vae.last_report.parked_gb > 0


def test_a_part_goes_on_in_smaller_steps(parts, monkeypatch):
    """Memory runs out before all steps have begun: the histories that are there are handed over."""
    vae, z, whole = parts
    seen, attempt = [], ExecutionContext.attempt

    def short(self, work, *args, **options):
        if not self.dry and not seen and self.done["latents"] == T - 12 and self.between:
            seen.append(work)
            raise MemoryError("none left")
        return attempt(self, work, *args, **options)

    monkeypatch.setattr(ExecutionContext, "attempt", short)
    part, expected = vae.decode(z, chunk=1, start=4 * T - 8, frames=3), whole[:, 4 * T - 8 : 4 * T - 5]
    assert seen and vae.last_report.events["oom_step_downs"] == 1
    assert vae.last_report.events["replayed_chunks"] == 0
    torch.testing.assert_close(part, expected, rtol=0, atol=2e-5 * float(expected.std()))  # a CPU's smaller steps


def test_a_step_knows_whether_it_takes_part():
    state = State(place=Place({"a": 0, "b": 3}, 2))
    assert (state.takes_part("a"), state.inside) == (True, False)
    assert (state.takes_part("b"), state.inside) == (False, True)
    assert State().takes_part("whatever")


@pytest.mark.parametrize("first, last, size, edges", [(0, 7, 3, ()), (2, 9, 4, (0, 3, 5, 9)), (4, 5, 1, (1, 2))])
def test_chunks(first, last, size, edges):
    """Chunks follow each other and cross no edge."""
    at, ends = first, []
    while at < last:
        end = chunk_end(at, last, size, edges)
        assert at < end <= at + size
        at = end
        ends.append(end)
    assert ends[-1] == last
    assert all(e in ends for e in edges if first < e < last)


def test_frames_of_latents():
    assert [frames_of(n, 4) for n in range(4)] == [0, 1, 5, 9]


def test_attention():
    """A decoder of which a step sees all frames before its own: parts begin with the clip."""
    program = cosmos.ARCHITECTURE.decoder(cosmos.ARCHITECTURE.published.config)
    assert program.reach[0] == math.inf
    assert program.window(4000, 4001, 600) == (0, 501)


@pytest.mark.parametrize("begins, steps, cycle, expected", [
    ((0, 0, 1, 3, 6, 9), Steps(4), 1, (0, 0, 0, 0, 4, 8)), ((0, 2, 11), Steps(0), 1, (0, 0, 0)),
    ((0, 2, 5, 6), Steps(4, lead=1), 1, (0, 1, 5, 5)), ((0, 5, 9), Steps(3), 2, (0, 0, 6)),
    ((0, 0), Steps(3), 1, (0, 0)), ((1, 3, 9), Steps(4), 1, (1, 3, 9)), ((0, 3, 9), None, 1, (0, 3, 9)),
])  # fmt: skip
def test_first_part(begins, steps, cycle, expected):
    """A part that begins with the clip takes the chunks of the whole."""
    assert with_chunks(begins, steps, cycle) == expected


class Counted:
    """Chunks of a decode, and frames that each of its convolutions reads."""

    def __init__(self, monkeypatch):
        self.chunks, self.read, through = [], {}, clip._through

        def counted(run, clips, cut, *rest):
            return through(run, clips, lambda a, b: self.chunks.append((a, b)) or cut(a, b), *rest)

        inputs = ExecutionContext.inputs

        def reading(run, conv, x, *args, **options):
            if not run.dry:
                self.read[conv.key] = self.read.get(conv.key, 0) + x.shape[0]
            return inputs(run, conv, x, *args, **options)

        monkeypatch.setattr(clip, "_through", counted)
        monkeypatch.setattr(ExecutionContext, "inputs", reading)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 12])
@pytest.mark.parametrize("start", [1, 17, 40])
def test_a_part_computes_no_more_than_the_whole(parts, monkeypatch, start, chunk, fused):
    """Nor in more chunks, where what it depends on reaches back to the clip's start."""
    vae, z, _ = parts
    z = z[:, :, :12]
    if not fused:
        monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: "not here")
    vae = vae.with_options(vae.options)
    with monkeypatch.context() as patch:
        all_of_it = Counted(patch)
        whole = vae.decode(z, chunk=chunk)
    assert vae.last_report.lead == 0
    with monkeypatch.context() as patch:
        part_of_it = Counted(patch)
        part = vae.decode(z, chunk=chunk, start=start)
    assert torch.equal(part, whole[:, start:]) or not fused
    torch.testing.assert_close(part, whole[:, start:], rtol=0, atol=2e-5)
    assert part_of_it.chunks == all_of_it.chunks and len(all_of_it.chunks) == 12 // chunk
    assert part_of_it.read.keys() == all_of_it.read.keys() and bool(part_of_it.read) == fused
    assert all(part_of_it.read[key] <= count for key, count in all_of_it.read.items())
    if fused and chunk < 12 and start == 40:
        assert sum(part_of_it.read.values()) < sum(all_of_it.read.values())
    assert f"{vae.last_report.lead} latents before" in vae.last_report.text() and vae.last_report.lead > 0
