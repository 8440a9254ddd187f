"""The page and the data that are made of times at a card's ratio."""

import json

import pytest
from zerowaste_vae.engine.extras.bench.expected import Expected, expected

FIGURES = {"median": 40.0, "low": 39.0, "high": 41.5, "runs": 2}
ROWS = [
    {"operator": "conv3d", "stage": "8x", "what": "128->128", "kind": "f32", "ms": 30.0, "gflop": 9.0, "gb": 1.0,
     "l2_gb": 2.0},
    {"operator": "norm_act", "stage": "8x", "what": "", "kind": None, "ms": 7.9, "gflop": 0.0, "gb": 9.0, "l2_gb": 0.0},
    {"operator": "coefficients", "stage": "", "what": "", "kind": None, "ms": 0.06, "gflop": 0.0, "gb": 0.1,
     "l2_gb": 0.0},
    {"operator": "statistics", "stage": "", "what": "", "kind": None, "ms": 0.04, "gflop": 0.0, "gb": 0.2,
     "l2_gb": 0.0},
]  # fmt: skip


@pytest.fixture
def page(load_tool):
    return load_tool("ratio_page")


def found(**other):
    case = {"family": "seedvr2", "precision": "fp16", "frames": 21, "width": 1280, "height": 720, "on": [],
            "case": "seedvr2-fp16", "plain": FIGURES, "ratio": FIGURES | {"median": 39.0}, "rows": ROWS}  # fmt: skip
    return {"title": "A", "card": "RTX 5070 Ti", "rates": "geforce", "gpu": "NVIDIA H200", "mhz": 2000.0,
            "processors": 132, "torch": "2.11", "form": "C", "time": "2026-11-28", "factors": {"f32": 5.0, "f16": 2.5,
            "s32": 2.5}, "measured": {"f32": 1280.0, "f16": 1280.0, "s32": 2560.0}, "knee": [],
            "cases": [case | other, {**case, "precision": "int8", "failed": "RatioError: no"}]}  # fmt: skip


def test_an_entry_keeps_clocks_and_bytes(page):
    one = found()
    entry = page.entry_of(one, one["cases"][0])
    assert [row["name"] for row in entry["rows"]] == ["conv3d 8x 128->128", "norm_act 8x", "the rest"]
    assert entry["rows"][0]["clocks"] == pytest.approx(30e-3 * 132 * 2000e6 / 1e6)
    assert entry["rows"][2] == {"name": "the rest", "products": False, "clocks": pytest.approx(0.1 * 132 * 2),
                                "gb": pytest.approx(0.3), "l2_gb": 0.0}  # fmt: skip
    assert entry["host_ms"] == pytest.approx(1.0) and entry["latents"] == [6, 90, 160]
    own = page.entry_of(one, one["cases"][0] | {"mhz": 1000.0})
    assert own["rows"][0]["clocks"] == pytest.approx(entry["rows"][0]["clocks"] / 2)


def test_the_page_and_the_data_are_written(page, tmp_path):
    for folder in ("docs", "engine/extras/bench"):
        (tmp_path / folder).mkdir(parents=True)
    place = tmp_path / "docs" / "ratio.md"
    place.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    files[0].write_text(json.dumps(found()))
    files[1].write_text(json.dumps(found(ratio=FIGURES) | {"title": "B"}))
    assert page.write(files, tmp_path) == 0
    text = place.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "### A: at the ratio of RTX 5070 Ti" in text and "### B: at the ratio" in text
    assert "| SeedVR2, fp16, 1280x720x21 | 40.0 (39.0 to 41.5) | 39.0 " in text and "not timed: no" in text
    data = json.loads((tmp_path / "engine/extras/bench/ratio.json").read_text())
    assert [one["host_ms"] for one in data["entries"]] == [2.0]  # the later file's
    from zerowaste_vae.engine.families import DEFAULT
    from zerowaste_vae.engine.kernels.gpus import find

    gpu, config = find("RTX 4090", "").gpu, DEFAULT.published.config
    assert isinstance(expected(gpu, DEFAULT, config, "decoder", "fp16", 6, 90, 160, data=data), Expected)


def whole(**other):
    """A run in which operators were not timed."""
    one = found(reserved_gb=9.52, stated_gb=9.57, **other)
    for case in one["cases"]:
        del case["rows"]
    return one


def test_whole_decodes_are_beside_what_is_computed_of_rows(page, tmp_path):
    """The H200's own clock and processors give the 39.0 ms of the rows again, 0.1 more where bytes do not overlap."""
    for folder in ("docs", "engine/extras/bench"):
        (tmp_path / folder).mkdir(parents=True)
    place = tmp_path / "docs" / "ratio.md"
    place.write_text(f"{page.BEGIN}\n{page.END}\n")
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    for path, one in zip(files, (whole(ratio=FIGURES), found()), strict=True):
        path.write_text(json.dumps(one))
    page.write(files, tmp_path)
    text = place.read_text()
    line = next(line for line in text.splitlines() if "| 9.52, 9.57 |" in line)
    assert line.startswith("| SeedVR2, fp16, 1280x720x21 | 40.0 (39.0 to 41.5) | 40.0 (39.0 to 41.5) |")
    assert "| 39.0 to 39.1 (-2.5 to -2.3 %) |" in line
    data = json.loads((tmp_path / "engine/extras/bench/ratio.json").read_text())
    assert len(data["entries"]) == 1
    mixed = found() | {"cases": [*found()["cases"], *whole()["cases"]]}
    assert any(line.endswith("| 39.0 (39.0 to 41.5) | not timed | not timed |") for line in page.section(mixed, {}))
    page.write(files[:1], tmp_path)
    assert "| 9.52, 9.57 | no times by operator | no times by operator |" in place.read_text()
    assert json.loads((tmp_path / "engine/extras/bench/ratio.json").read_text())["entries"] == []


@pytest.mark.parametrize(("precision", "names"), [("fp16", ["winograd"]), ("int8", []), ("fp16_fast", [])])
def test_a_form_that_a_precision_has_not_is_no_toggle(page, precision, names):
    """`plan` asks for entries of such precisions without it; the table says what was asked for."""
    one = found(on=["winograd"], precision=precision)
    assert page.entry_of(one, one["cases"][0])["on"] == names
    assert any(f"| SeedVR2, {precision}, `--on winograd`, 1280x720x21 |" in line for line in page.section(one, {}))


@pytest.fixture
def tool(load_tool):
    return load_tool("measure_ratio")


def test_texts_of_both_forms_are_assembled_ahead(tool):
    """No set holds those in Winograd form: measuring would have to assemble them."""
    direct, form = (case for case in tool.CASES if case.family == "flux")
    symbols, formed = ({symbol for symbol, _ in case.texts("C")} for case in (direct, form))
    assert formed - symbols == {"winograd2d_bf16"} and len(list(form.texts("C"))) > len(formed)


def test_another_k_is_another_clock_of_the_same_products(tool):
    import argparse

    import torch
    from zerowaste_vae.engine.extras.bench.ratio import Ratio
    from zerowaste_vae.engine.kernels.gpus import find

    gpu = find("RTX 5070 Ti", "").gpu
    rates = {"f32": 1360.0, "f16": 1360.0, "s32": 2720.0}
    ratio = Ratio(gpu, torch.device("cpu"), None, dict.fromkeys(rates, 5.0), rates, 1776.0, 132, None)
    here = tool.chosen(ratio, argparse.Namespace(factors="4.79,2.41,2.39"))
    assert here.measured["f32"] * here.mhz == pytest.approx(1360.0 * 1776.0)
    assert here.measured == pytest.approx({"f32": 1226.24, "f16": 1233.92, "s32": 2447.36}) and here.mhz > 1960
    assert tool.chosen(ratio, argparse.Namespace(factors=None)) is ratio


@pytest.mark.parametrize("names", ["seedvr2", "seedvr2-fp16:x", "seedvr2-fp16:1:2:3", ""])
def test_what_is_no_case_is_refused(tool, names, tmp_path):
    with pytest.raises(SystemExit):
        tool.main(["assemble", "--cases", names or ",", "--folder", str(tmp_path)])


def test_the_data_that_ship_are_of_the_files_that_ship(page, tmp_path):
    """`measure_ratio.py page` was run after the last measurement."""
    for folder in ("docs", "engine/extras/bench"):
        (tmp_path / folder).mkdir(parents=True)
    root = page.Path(page.__file__).resolve().parent.parent
    (tmp_path / "docs/ratio.md").write_text((root / "docs/ratio.md").read_text("utf-8"), "utf-8")
    page.write([root / f"docs/figures/{name}.json" for name in ("ratio-decodes", "ratio-before", "ratio")], tmp_path)
    for name in ("docs/ratio.md", "engine/extras/bench/ratio.json"):
        assert (tmp_path / name).read_text("utf-8") == (root / name).read_text("utf-8")
