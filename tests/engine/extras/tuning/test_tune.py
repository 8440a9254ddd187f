"""A whole tuning, with nobody who compiles or measures: what is asked, kept, merged, cancelled and said."""

from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae.engine.errors import Cancelled, InputError
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.tuning import kept
from zerowaste_vae.engine.extras.tuning import tune as module
from zerowaste_vae.engine.extras.tuning.candidates import table
from zerowaste_vae.engine.families import ARCHITECTURES
from zerowaste_vae.engine.kernels.conv3d import tuned
from zerowaste_vae.engine.kernels.targets import capabilities
from zerowaste_vae.engine.loader import PRECISIONS
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.fused_walk import FusedWalk

DEVICE = torch.device("cuda", 5)
HERE = capabilities("sm_89", 89, (3, 7))
MACHINE = {"gpu": "Card", "sm": 89, "driver": "1", "torch": "2", "triton": "3.7", "zerowaste_vae": "0"}


def walk(number):
    a = ARCHITECTURES[number]
    return FusedWalk(a, a.published.config, PRECISIONS[a.native], DEFAULTS)


@pytest.fixture
def rig(tmp_path, monkeypatch):
    """asked: kinds that were measured; at: what happens before each; link, ms: what is measured."""
    made = SimpleNamespace(folder=tmp_path, asked=[], at=lambda: None, ended=0, link=12e9, ms=2.0)

    class Nobody:
        def __init__(self, *_):
            pass

        def start(self, *_):
            pass

        def end(self):
            made.ended += 1

        def wait(self, layer, until):
            return [None] * len(module.candidates(HERE, layer.kind))

        def measure(self, layer, schedules, until):
            made.at()
            made.asked.append(layer.kind)
            wrong = ["wrong numbers" if i == 1 else None for i in range(len(schedules))]
            return [[] if why else [made.ms - i / 10] * 5 for i, why in enumerate(wrong)], wrong

        def link(self, until, check):
            return made.link

    monkeypatch.setenv("ZEROWASTE_CACHE", str(tmp_path))
    for name, value in {"Pool": Nobody, "Gpu": Nobody, "why_not": lambda *_: None, "proven": lambda *_: HERE}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kept, "machine", lambda *_: MACHINE)
    monkeypatch.setattr(kept, "of", lambda *_: kept.read(MACHINE))
    for name in ("_tables", "_waiting"):
        monkeypatch.setattr(tuned, name, {})
    return made


def test_tune(rig):
    """The best schedules are used and stored."""
    seen = []
    tuning, found = module.tune(walk(0), DEVICE, progress=lambda *n: seen.append(n))
    assert kept.read(MACHINE) == tuning and tuned.table(DEVICE) == tuning.schedules
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] == len(tuning.schedules) == len(rig.asked)
    for kind, schedule in tuning.schedules.items():
        assert schedule == module.candidates(HERE, kind)[-1] != table(HERE, kind)
    assert len(tuning.dropped) == len(rig.asked) and tuning.dropped[0][2] == "wrong numbers"
    assert tuning.link == 12e9 and tuning.rates().link == 12e9 and tuning.work > 0
    assert rig.ended == 2
    text = "\n".join(module.lines(tuning, found, HERE))
    assert text.count("dropped for") == len(rig.asked) and "12.0 GB/s each way" in text and "the table's 2 ms" in text


def test_another_vae(rig):
    """Another VAE adds its layers and changes no others."""
    first, _ = module.tune(walk(0), DEVICE)
    count = len(rig.asked)
    second, found = module.tune(walk(1), DEVICE)
    assert first.schedules.items() < second.schedules.items()
    assert set(found.chosen) == set(rig.asked[count:]) and not set(found.chosen) & set(first.schedules)
    again, nothing = module.tune(walk(0), DEVICE)
    assert again == second and not nothing.chosen and len(rig.asked) == len(second.schedules)
    module.tune(walk(0), DEVICE, again=True)
    assert len(rig.asked) == len(second.schedules) + count


def test_again_replaces_rates(rig):
    """Measure again: a new work rate counts, and a link that could not be measured keeps its old rate."""
    first, _ = module.tune(walk(0), DEVICE)
    rig.link, rig.ms = None, 4.0
    second, _ = module.tune(walk(0), DEVICE, again=True)
    assert second.link == 12e9 and 0 < second.work < first.work


def test_cancel_and_failure(rig):
    """A tuning that is cancelled or fails changes nothing."""
    before, _ = module.tune(walk(1), DEVICE)
    files = {p: p.read_bytes() for p in rig.folder.rglob("*") if p.is_file()}
    with pytest.raises(Cancelled):
        module.tune(walk(0), DEVICE, cancel=lambda: len(rig.asked) > 12)

    def fail():
        raise RuntimeError("the GPU is lost")

    rig.at = fail
    with pytest.raises(RuntimeError):
        module.tune(walk(0), DEVICE)
    assert {p: p.read_bytes() for p in rig.folder.rglob("*") if p.is_file()} == files
    assert tuned.table(DEVICE) == before.schedules and rig.ended == 6


def test_running(rig):
    """A run in progress keeps its schedules."""
    with tuned.held(DEVICE):
        tuning, _ = module.tune(walk(1), DEVICE)
        assert not tuned.table(DEVICE)
    assert tuned.table(DEVICE) == tuning.schedules


def test_refused(monkeypatch):
    """A CPU, and a VAE on plain torch, are refused."""
    with pytest.raises(InputError, match="needs a CUDA GPU"):
        module.tune(walk(0), torch.device("cpu"))
    monkeypatch.setattr(module, "why_not", lambda *_: None)
    plain = next(i for i, a in enumerate(ARCHITECTURES) if a.published and not walk(i).halves)
    with pytest.raises(InputError, match="runs plain torch"):
        module.tune(walk(plain), DEVICE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_command_without_gpu(capsys, tmp_path):
    """Without a GPU the command says so in one line."""
    assert main(["tune"]) == 2
    assert capsys.readouterr().err == (
        "zerowaste-vae: error: tune needs a CUDA GPU: a CPU runs torch's own operators\n"
    )
    for arguments in (["--seconds", "1"], ["--share", str(tmp_path / "no" / "f.json")]):
        assert main(["tune", *arguments]) == 2
        assert arguments[1].split("/")[-1][:1] in capsys.readouterr().err
