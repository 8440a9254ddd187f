"""A tuning's file on disk, and damaged files."""

import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae.engine import log
from zerowaste_vae.engine.extras.tuning import kept
from zerowaste_vae.engine.extras.tuning.candidates import candidates
from zerowaste_vae.engine.extras.tuning.kept import Tuning
from zerowaste_vae.engine.kernels.conv3d.schedules import Schedule
from zerowaste_vae.engine.kernels.conv3d.tuned import Kind
from zerowaste_vae.engine.kernels.targets import capabilities, prebuilt
from zerowaste_vae.engine.planning.cost import Rates
from zerowaste_vae.engine.report import Report

MACHINE = {"gpu": "A Card, 16 GB", "sm": 89, "driver": "1.2", "torch": "2", "triton": "3.7", "zerowaste_vae": "0.1.0"}
KIND = Kind("float16", "f32", 128, 256, False, 1, 3, False, True)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROWASTE_CACHE", str(tmp_path))
    monkeypatch.setattr(log, "_said", set())
    return tmp_path


@pytest.fixture
def tuning():
    schedules = candidates(capabilities("sm_89", 89, (3, 7)), KIND)
    small = KIND._replace(small=True)
    return Tuning(
        MACHINE, {KIND: schedules[-1], small: candidates(capabilities("sm_89", 89, (3, 7)), small)[0]},
        {KIND: (1.5, 2.0), small: (0.1, None)}, [(str(KIND), "positions 128", "error 0.3")], [str(small)], 24e9, 150e12,
    )  # fmt: skip


def test_written_is_read(here, tuning):
    """A tuning is read as it was written."""
    assert kept.read(MACHINE) is None
    kept.write(tuning)
    path = kept.place(tuning.machine)
    assert path.parent == here / "tuning" and path.name.startswith("a-card-16-gb-")
    assert kept.read(MACHINE) == tuning
    assert list(path.parent.iterdir()) == [path]
    assert tuning.rates() == Rates(150e12, 24e9) and replace(tuning, link=None).rates() == Rates(work=150e12)


@pytest.mark.parametrize("name", MACHINE)
def test_file_by_machine(here, tuning, name):
    """Another driver, card or version has another file."""
    kept.write(tuning)
    other = MACHINE | {name: 90 if name == "sm" else "another"}
    assert kept.place(other) != kept.place(MACHINE) and kept.read(other) is None


def damaged(tuning):
    text = json.dumps(tuning.as_dict())
    yield text[: len(text) // 2]
    yield "[]"
    yield ""
    yield text.replace('"format": 2', '"format": 1')
    yield text.replace("A Card", "Another Card")  # copied from another machine
    yield text.replace('"positions": 128', '"positions": 32')  # more sums than plans state
    yield text.replace('"float16"', '"float61"')
    yield text.replace("24000000000.0", "-1.0")
    yield text.replace("24000000000.0", "NaN")
    yield text.replace("24000000000.0", "1" + "0" * 400)
    yield "[" * 100_000


def test_damaged_file(here, tuning, caplog, monkeypatch):
    """A damaged file costs a line in the log."""
    kept.write(tuning)
    path = kept.place(tuning.machine)
    for text in damaged(tuning):
        monkeypatch.setattr(log, "_said", set())
        caplog.clear()
        path.write_text(text, encoding="utf-8")
        assert kept.read(MACHINE) is None
        assert len(caplog.records) == 1 and str(path) in caplog.text and "the schedules of the table run" in caplog.text
        assert "\n" not in caplog.records[0].getMessage()
    kept.write(tuning)
    assert kept.read(MACHINE) == tuning


def test_atomic_write(here, tuning):
    """A reader sees the old file or the new one."""
    kept.write(tuning)
    other, done = replace(tuning, link=12e9), threading.Event()

    def write():
        for i in range(60):
            kept.write((tuning, other)[i % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert kept.read(MACHINE) in (tuning, other)
    writer.join()


def test_no_cache_folder(here, tuning, monkeypatch, caplog):
    """A cache folder that cannot be written costs a line in the log."""
    (here / "file").write_text("")
    monkeypatch.setenv("ZEROWASTE_CACHE", str(here / "file"))
    kept.write(tuning)
    assert kept.read(MACHINE) is None
    assert len(caplog.records) == 1


def test_file_by_kernels(here, tuning, monkeypatch):
    """Candidates follow the form of the prebuilt kernels, whatever Triton is there."""
    identities = {"A": "A 1", "triton": "triton 3.6"}
    ways = {way: SimpleNamespace(way=way, sm=86, kernels=True, identity=identities[way]) for way in identities}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(kept, "_known", {})
    monkeypatch.setattr(kept, "driver", lambda: "570")
    offered = []
    monkeypatch.setattr(kept, "offer", lambda *of: offered.append(of))
    device, made = torch.device("cuda", 5), prebuilt("a GPU", 86, "A")
    machine = kept.machine(device, ways["A"])
    kind = next(iter(tuning.schedules))
    kept.write(kept.Tuning(machine, {kind: candidates(made, kind)[-1]}))
    monkeypatch.setattr(kept, "triton_version", lambda: None)
    assert kept.of(device, ways["A"]).schedules and kept.of(device, ways["triton"]) is None
    assert [way for _, _, way in offered] == ["A"]
    kept._known.clear()
    identities["A"] = ways["A"].identity = "A 2"  # the set was built anew
    assert kept.of(device, ways["A"]) is None


@pytest.mark.parametrize(
    ("text", "version"),
    [("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15\nGCC 12.2", "535.104.05"),
     ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (b@h)  Mon", "570.86.10"),
     ("GCC version: 12.2.0", "")],
)  # fmt: skip
def test_driver_version(text, version):
    """The driver's version is read from the system's text."""
    assert kept.version_in(text) == version


def test_cpu():
    """A CPU has no tuning."""
    cpu = torch.device("cpu")
    assert kept.of(cpu) is None and kept.words(cpu) == "" and kept.rates(cpu) == Rates()
    if not torch.cuda.is_available():
        assert kept.of(torch.device("cuda", 0)) is None


@pytest.mark.parametrize(
    ("sm", "words"),
    [(89, "schedules chosen without measuring"), (90, "as measured on an H200"), (120, "schedules chosen without meas"),
     (75, "")],
)  # fmt: skip
def test_words(tuning, monkeypatch, sm, words):
    """Say where schedules come from."""
    place = torch.device("cuda", 7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kept, "target", lambda device: capabilities("a card", sm, (3, 7)))
    monkeypatch.setattr(kept, "_known", {(place, "triton"): None, (place, "plain"): None})
    assert kept.words(place).startswith(words) and bool(kept.words(place)) == bool(words)
    monkeypatch.setattr(kept, "_known", {(place, "triton"): tuning, (place, "plain"): None})
    assert kept.words(place) == ("tuned on this GPU (2 kinds of layers)" if words else "")
    report = Report("decode", (1, 1, 8, 8), "a", "fp16", "cuda:7", schedules=kept.words(place))
    assert ("kernels tuned on this GPU" in report.text()) == bool(words)
    assert report.as_dict()["schedules"] == kept.words(place)


def test_take_up(tuning, monkeypatch):
    """On a device that nothing runs on."""
    from zerowaste_vae.engine.kernels.conv3d import tuned

    place = torch.device("cuda", 7)
    monkeypatch.setattr(kept, "_known", {})
    monkeypatch.setattr(tuned, "_tables", {})
    kept.take_up(place, tuning)
    assert tuned.table(place) == tuning.schedules
    assert Schedule(**vars(tuning.schedules[KIND])) == tuning.schedules[KIND]
