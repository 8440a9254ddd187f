"""Two real GPUs: the bits of one, by segments in one process and under torchrun, and where one of them fails."""

import json
import threading
from pathlib import Path

import pytest
import torch
from zerowaste_vae import Cancelled
from zerowaste_vae.engine.execution import call

from ...execution.own_processes import python
from ...gpu_models import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
MODELS = (("seedvr2-8-bit", "fp16"), ("seedvr2-8-bit", "fp8"), ("wan2.1-tiny", "bf16"), ("wan2.2-tiny", "bf16"))
WARM = tuple(dict.fromkeys(model for model, _ in MODELS))
TWO = ["cuda:0", "cuda:1"]
#: Latents: odd rows and columns.
SIZES = (9, 21, 13), (7, 9, 11)


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def vae(request):
    vae = make(*request.param)
    yield vae
    vae.release()


def test_segments_have_the_bits_of_one(vae, noise, early):
    """Whichever device is the current one."""
    for size in SIZES:
        z = noise(1, vae.latent_channels, *size)
        video = noise(1, vae.frames(size[0]), *(vae.spatial * n for n in size[1:]), 3).sigmoid()
        frames, latent = vae.decode(z), vae.encode(video)
        for current in (0, 1):
            with torch.cuda.device(current):
                assert torch.equal(vae.decode(z, devices=TWO), frames)
                parts = vae.last_report.parts
                assert [str(part.device)[:6] for _, part in parts] == TWO
                assert torch.equal(vae.encode(video, devices=TWO), latent)
                pieces = [*vae.stream(z, devices=TWO)]
                assert torch.equal(torch.cat(pieces, 1), frames)
                assert torch.cuda.current_device() == current


@pytest.mark.parametrize("vae", MODELS[:1], indirect=True, ids="-".join)
def test_failing_device(vae, noise, early, monkeypatch):
    """It runs out of memory behind its first frames, really: the first GPU has the bits."""
    z, made = noise(1, 16, 9, 21, 13), call.decode
    whole, taken = vae.decode(z, chunk=1), []

    def failing(core, *rest):
        for i, finished in enumerate(made(core, *rest)):
            yield finished
            if core.device.index == 1 and not i:
                taken.append(i)
                torch.empty(1 << 50, dtype=torch.uint8, device=core.device)

    monkeypatch.setattr(call, "decode", failing)
    assert torch.equal(torch.cat([*vae.stream(z, chunk=1, devices=TWO)], 1), whole)
    assert taken and vae.last_report.events["handed_over"] == 1
    monkeypatch.undo()


@pytest.mark.parametrize("vae", MODELS[:1], indirect=True, ids="-".join)
def test_a_cancel_stops_both(vae, noise, early):
    z, told = noise(1, 16, 9, 21, 13), []
    with pytest.raises(Cancelled):
        vae.decode(z, chunk=1, devices=TWO, progress=lambda *at: told.append(at), cancel=lambda: bool(told))
    assert not [t.name for t in threading.enumerate() if t.name.startswith("zerowaste")]
    assert torch.equal(vae.decode(z, chunk=1, devices=TWO), vae.decode(z, chunk=1))


def ranks(*arguments):
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    return python(*torchrun, str(Path(__file__).with_name("rank_gpus.py")), *arguments)


def test_ranks_have_the_bits_of_one():
    """One process for all: ranks take seconds to find each other."""
    done = ranks(*(word for model in MODELS for word in model))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))
    assert len(found) == 4 * len(MODELS)
    for case, segments, same in found:
        assert same and segments == 2, case
