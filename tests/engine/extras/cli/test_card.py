"""`--card`, `--kernels` and `info --weights`: what would run on a GPU that is not here, without asking any."""

import json
from types import SimpleNamespace

import pytest
from zerowaste_vae.engine.extras.bench import projection
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.kernels import targets
from zerowaste_vae.engine.planning import choice


@pytest.fixture(autouse=True)
def complete(monkeypatch):
    """All sets are here and have everything, and there is no Triton."""
    monkeypatch.setattr(targets, "_not_there", lambda form: None)
    monkeypatch.setattr(targets, "triton_version", lambda: None)
    monkeypatch.setattr(choice, "library", lambda: SimpleNamespace(covers=lambda form, use: False))
    monkeypatch.setattr(choice, "missing", lambda form, keys: None)
    monkeypatch.setattr(choice, "needs", lambda *_: frozenset())
    monkeypatch.delenv("ZEROWASTE_KERNELS", raising=False)


def said(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_info_says_what_runs_every_half_there(capsys):
    text = said(capsys, "info", "--weights", "seedvr2", "--card", "sm_120")
    lines = [line.split(None, 1) for line in text.splitlines()]
    assert ["card", "sm_120, sm_120 (projected, not measured)"] in lines
    halves = [rest for name, rest in lines if name in ("decoder", "encoder") and ":" in rest]
    assert [rest.split(":")[0] for rest in halves] == ["fp16", "fp8", "int8"] * 2
    assert all("prebuilt kernels, set D" in rest for rest in halves)
    assert "99 KiB" in text and "ms a frame at 1280x720 (RTX 5070 Ti's published peaks)" in text and "GPU 0" not in text


@pytest.mark.parametrize(("card", "there"), [("sm_86", True), ("sm_89", True), ("sm_120", True), ("sm_80", False),
                                             ("sm_90", False)])  # fmt: skip
def test_fast_precisions_suggested(capsys, card, there):
    """Cards that sum faster in fp16 are told which precisions gain, and what they cost."""
    text = said(capsys, "info", "--card", card)
    assert (("suggestion" in text) is there) and (("61.6 dB" in text and "fp16_fast" in text) is there)


@pytest.mark.parametrize(("card", "words"), [
    ("sm_86", ["set A", "fp8: not there; int8 runs instead", "RTX 3090's"]), ("sm_89", ["set B", "RTX 4090's"]),
    ("RTX 5070 Ti", ["RTX 5070 Ti, sm_120", "set D"]), ("sm_75", ["older than sm_80", "plain torch"]),
    ("H200", ["set C (Triton is not installed)"]),
])  # fmt: skip
def test_info_of_other_cards(capsys, card, words):
    text = said(capsys, "info", "--weights", "seedvr2", "--card", card)
    assert [word for word in words if word not in text] == []


def test_other_kernels_can_be_asked_for(capsys):
    assert "set A" in said(capsys, "info", "--card", "sm_120", "--kernels", "a")
    assert "plain torch is asked for" in said(capsys, "info", "--card", "sm_120", "--kernels", "plain")


def test_a_half_that_a_set_lacks_is_named(capsys, monkeypatch):
    monkeypatch.setattr(choice, "missing", lambda form, keys: f"set {form} lacks kernels of this model (x)")
    text = said(capsys, "info", "--weights", "wan2.1", "--card", "sm_86")
    assert "plain torch (set A lacks kernels of this model (x); Triton is not installed)" in text
    plan = json.loads(said(capsys, "plan", "--size", "640x352", "--vram-gb", "13", "--card", "sm_86", "--json"))
    assert plan["card"] == {"name": "sm_86", "sm": 86, "runs": plan["card"]["runs"], "projected": True}
    assert "lacks" in plan["card"]["runs"] and "set A lacks" in plan["note"]
    assert plan["plans"][0]["text"].startswith("plain torch")


def test_plan_says_what_runs_there(capsys):
    text = said(capsys, "plan", "--size", "640x352", "--vram-gb", "13", "--card", "RTX 4090", "--precision", "fp8")
    assert "on RTX 4090, sm_89 (projected, not measured): prebuilt kernels, set B; at least" in text
    assert "fused kernels" in text


@pytest.mark.parametrize(("arguments", "words"), [
    (["info", "--card", "Voodoo"], "--card 'Voodoo' names no GPU that is known here"),
    (["info", "--weights", "nobody"], "--vae nobody is no file here, and no family; there are seedvr2"),
    (["info", "x.safetensors", "--weights", "flux"], "--vae flux: x.safetensors is named too"),
    (["info", "--kernels", "E"], "--kernels E names no kernels: give auto, triton, plain, A"),
    (["plan", "--size", "64x64", "--card", "sm_"], "--card 'sm_' names no GPU"),
    (["plan", "--size", "64x64", "--card", "sm_89"], "--card sm_89 does not say how much memory: name a target with"),
    (["plan", "--size", "64x64", "--kernels", "none"], "--kernels none names no kernels"),
])  # fmt: skip
def test_other_words_are_one_line(capsys, arguments, words):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_projected_onto_card(capsys, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(projection, "project", lambda report, cards: seen.append(cards) or [])
    from zerowaste_vae.engine.extras.bench import schema, table

    monkeypatch.setattr(schema, "read", lambda path: {"kind": "decode", "environment": {}, "rows": []})
    monkeypatch.setattr(table, "environment_line", lambda environment: "")
    monkeypatch.setattr(table, "lines", lambda rows: [])
    said(capsys, "bench", "report", "x.json")
    said(capsys, "bench", "report", "x.json", "--card", "sm_89")
    assert [[card.name for card in cards] for cards in seen] == [["RTX 5070 Ti", "RTX 4090", "RTX 3090"], ["RTX 4090"]]
    assert main(["bench", "report", "x.json", "--card", "H200"]) == 2
    assert "its peaks are not kept here; there are those of RTX 5070 Ti" in capsys.readouterr().err


@pytest.mark.parametrize(("card", "targets"), [("5070ti", [13.0]), ("RTX 5060 Ti", [6.5, 13.0]), ("3090", [19.5])])
def test_a_cards_memory_is_the_target(capsys, card, targets):
    """81.25 % of it, of each size that the card is sold with; a named target comes first."""
    plan = json.loads(said(capsys, "plan", "--size", "640x352", "--card", card, "--json"))
    assert [row["target_gb"] for row in plan["plans"]] == pytest.approx(targets)
    named = json.loads(said(capsys, "plan", "--size", "640x352", "--card", card, "--vram-gb", "5", "--json"))
    assert [row["target_gb"] for row in named["plans"]] == [5.0]


def test_plans_have_the_form_of_the_card(capsys):
    """Weights in Winograd form take more, where its row or generation says that layers have it."""
    peaks = {}
    for card in ("RTX 5070 Ti", "L40S", "sm_89", "H200", "sm_90"):
        text = said(capsys, "plan", "--size", "640x352", "--card", card, "--vram-gb", "12", "--chunk", "1", "--json")
        (plan,) = json.loads(text)["plans"]
        peaks[card] = plan["peak_gb"]
    assert peaks["H200"] == peaks["sm_90"] and peaks["RTX 5070 Ti"] == peaks["L40S"] == peaks["sm_89"]
    assert 0.05 < peaks["L40S"] - peaks["H200"] < 0.25


def test_plan_states_the_expected_time(capsys):
    """In seconds for the clip, said to be computed, in the card's form; more on a card of fewer processors."""
    times = []
    for card in ("RTX 5070 Ti", "rtx 5070"):
        text = said(capsys, "plan", "--size", "1280x720", "--card", card)
        line = next(line for line in text.splitlines() if line.startswith("expected "))
        assert "computed, not measured on it" in line and line.endswith("for 1280x720x81")
        times.append([float(word) for word in line.split()[1:4:2]])
        if "at least " in text:  # the limit is of the form that runs
            least, low = (float(text.split(word)[1].split()[0]) for word in ("at least ", " s ("))
            assert 0.7 * low < least < low
    assert 7 < times[0][0] < times[0][1] < 15 and times[1][0] > 1.3 * times[0][0]


@pytest.mark.parametrize(("arguments", "words"), [
    (["--precision", "fp8"], "not timed: seedvr2 fp8 decoder at the ratio of cards like the RTX 5070 Ti"),
    (["--encode"], "not timed: seedvr2 fp16 encoder"), (["--weights", "mochi"], "not timed: mochi fp16 decoder"),
])  # fmt: skip
def test_what_was_not_timed_is_said(capsys, arguments, words):
    text = said(capsys, "plan", "--size", "640x352", "--card", "RTX 5070 Ti", *arguments)
    assert words in text and "expected" not in text


def test_laptops_need_a_target(capsys):
    """Nothing is guessed for a GPU whose figures are not known."""
    assert main(["plan", "--size", "640x352", "--card", "RTX 5090 Laptop GPU"]) == 2
    error = capsys.readouterr().err
    assert "makers set a laptop GPU's clock and power" in error and "--vram-gb" in error and error.count("\n") == 1
    text = said(capsys, "plan", "--size", "640x352", "--card", "RTX 5090 Laptop GPU", "--vram-gb", "19.5")
    assert "on RTX 5090 Laptop GPU, sm_120 (projected, not measured): prebuilt kernels, set D" in text
    assert "expected" not in text and "not timed" not in text


def test_info_gives_a_cards_figures_and_times(capsys):
    text = said(capsys, "info", "--weights", "seedvr2", "--card", "rtx5070 ti")
    assert "70 processors, 2452 MHz listed, about 2760 under load, 16 GB at 896 GB/s" in text
    assert "fp16: expected " in text and "fp8: not timed" in text
    assert "no time is computed, and plans need --vram-gb" in said(capsys, "info", "--card", "RTX PRO 4500")
