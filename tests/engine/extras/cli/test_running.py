"""Test the common parts of commands: progress without a terminal, and messages of runs on a CPU."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import re
import sys
import threading
from itertools import islice
from pathlib import Path

import pytest
from zerowaste_vae.engine import load, log
from zerowaste_vae.engine.extras.cli import main, running
from zerowaste_vae.engine.extras.media.latents import write_latent


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """clock[0]: what time it is."""
    now = [100.0]
    monkeypatch.setattr(running.time, "monotonic", lambda: now[0])
    return now


def until(holds):
    """Wait for what another thread does."""
    for _ in range(1000):
        if holds():
            return
        threading.Event().wait(0.02)
    raise AssertionError("it has not come in 20 s")


def test_progress_lines_when_piped(monkeypatch):
    """Also while one chunk takes long, and never once it is over."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(running.Lines, "FIRST", 0.01)
    monkeypatch.setattr(running.Lines, "LONGEST", 0.01)
    with running.progress("decode", False) as report:
        until(lambda: sys.stderr.getvalue().count("decode: 0 steps in ") > 1)
        report(7, 28)
        until(lambda: "decode: 7 of 28 steps (25%) in " in sys.stderr.getvalue())
    said = sys.stderr.getvalue()
    threading.Event().wait(0.1)
    assert sys.stderr.getvalue() == said and not [t for t in threading.enumerate() if t.name.startswith("progress")]


def test_lines_of_a_day_are_few(clock):
    assert list(islice(running.Lines.waits(), 7)) == [10, 20, 40, 80, 120, 120, 120]
    lines = running.Lines("encode")
    clock[0] += 3700
    lines(7, 0)
    assert lines.line() == "encode: 7 steps in 3700 s"
    lines(7, 8)
    assert lines.line() == "encode: 7 of 8 steps (88%) in 3700 s"


def test_no_progress_lines(monkeypatch):
    """Short runs, --quiet and terminals have no progress lines."""
    for stream, quiet in ((io.StringIO(), False), (io.StringIO(), True), (None, False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with running.progress("decode", quiet) as report:
            report(1, 2)
        assert stream is None or stream.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with running.progress("decode", False) as report:
        report(1, 2)
    assert "\r" in sys.stderr.getvalue() and "1/2" in sys.stderr.getvalue()


#: What only a GPU's run may say.
OF_GPUS = re.compile(r"sm_\d|VRAM|CUDA Graph Captured|FP8 Path|Triton kernel fusion|vram_gb", re.I)


@pytest.mark.parametrize("more", [(), ("--precision", "bf16"), ("--precision", "int8"), ("--on", "channels_last_3d")])
def test_log_lines_on_a_cpu(tmp_path, monkeypatch, vae_file, noise, more, caplog, capsys):
    """The log of all that is said, and the report."""
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.chdir(tmp_path)
    write_latent("l.safetensors", noise(1, 16, 2, 2, 3))
    with caplog.at_level(logging.DEBUG, "zerowaste_vae"):
        code = main(["decode", "l.safetensors", "a.safetensors", "--vae", str(vae_file), "--verbose", *more])
    assert code == 0 and caplog.messages
    assert all(line.startswith(f"{log.PREFIX} ") for line in caplog.messages)
    for line in (*caplog.messages, *capsys.readouterr().out.splitlines()):
        assert not OF_GPUS.search(line), line
        assert "switched off" not in line, line


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32", "auto"])
def test_16_bit_on_a_cpu_warns(vae_file, precision, monkeypatch, caplog):
    monkeypatch.setattr(log, "_said", set())
    load(vae_file, precision, "cpu")
    warned = [line for line in caplog.messages if f"{precision} on a CPU: many compute it far slower than fp32" in line]
    assert len(warned) == (precision in ("fp16", "bf16"))


@pytest.mark.parametrize("asked", [{"verbose": True, "report": None}, {"verbose": False, "report": Path("r.json")}])
def test_no_report_is_said(asked, tmp_path, monkeypatch, caplog, vae_file):
    """Nothing is left to decode after a resume, or other ranks have made all."""
    monkeypatch.chdir(tmp_path)
    running.give_report(load(vae_file, device="cpu"), argparse.Namespace(**asked))
    assert "no report: this process has computed nothing" in caplog.text and not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize("buffering", [-1, 1 << 20])
def test_an_output_that_is_full_is_named(monkeypatch, capsys, buffering):
    """Also where it is written only at the end."""
    with open("/dev/full", "w", buffering) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["plan", "--size", "64x64", "--frames", "5", "--vram-gb", "2"]) == 2
        monkeypatch.undo()
    error = f"zerowaste-vae: error: standard output: cannot be written ({os.strerror(errno.ENOSPC)})"
    assert capsys.readouterr().err.splitlines()[-1] == error


def test_an_output_that_nobody_reads_ends_in_silence(monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["plan", "--size", "64x64", "--frames", "5", "--vram-gb", "2"]) == 2
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_what_is_full_is_not_the_output(monkeypatch, capsys):
    """A full disk under a file whose name the system does not tell, as that of a cache or a temporary one."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("zerowaste_vae.engine.extras.cli.plan.planner_of", full)
    assert main(["plan", "--size", "64x64", "--frames", "5"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"zerowaste-vae: error: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}"
