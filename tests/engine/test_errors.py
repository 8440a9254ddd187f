"""Texts of files in messages and in the log."""

from __future__ import annotations

import logging

import pytest
from zerowaste_vae.engine import errors, log
from zerowaste_vae.engine.errors import LINE, CheckpointError, InputError, NonFiniteError, PlanError, ZeroWasteError

#: A line break, escape sequences, a bell, text that is shown backwards, what nobody sees, half of a pair.
HOSTILE = "a\n[INFO] verified\r\x1b[2J\x1b]0;t\x07\x9b31m\u202egpj\u2066\u200b\u2028z\ud800\U000e0041"
SHOWN = "a [INFO] verified ?[2J?]0;t??31m?gpj?? z??"


def test_one_line():
    assert errors.one_line(HOSTILE) == SHOWN
    assert errors.one_line("x" * 400, 300) == "x" * 300 + "…" and errors.one_line("x" * 300, 300) == "x" * 300
    plain = "größe 大きさ 🙂 \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 a\u0301"  # with a joiner that words need
    assert errors.one_line(plain) == plain


@pytest.mark.parametrize("kind", [ZeroWasteError, CheckpointError, InputError, PlanError, NonFiniteError])
def test_errors_are_one_line(kind):
    assert str(kind(f"f: tensor {HOSTILE} is odd")) == f"f: tensor {SHOWN} is odd"
    assert len(str(kind("x" * 100_000))) == LINE + 1
    assert kind("a", 3).args == ("a", 3)


@pytest.mark.parametrize("say", [log.warn, log.once, log.info])
def test_log_lines_are_one_line(caplog, say):
    caplog.set_level(logging.INFO, logger="zerowaste_vae")
    say(f"{say.__name__}: {HOSTILE}")
    assert caplog.messages == [f"{log.PREFIX} {say.__name__}: {SHOWN}"]
    caplog.clear()
    say(f"{say.__name__}: " + "x" * 100_000)
    assert len(caplog.messages[0]) < LINE + 40


def test_another_librarys_error_is_named_on_one_line():
    assert errors.named(ValueError(f" b {HOSTILE}")) == "ValueError: b a"
