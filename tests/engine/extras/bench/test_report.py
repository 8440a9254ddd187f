import copy
import importlib.util
import json
import re
from base64 import b64decode
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from PIL import Image
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.extras.bench import plots as drawing
from zerowaste_vae.engine.extras.bench import projection, schema, table
from zerowaste_vae.engine.extras.bench.page import page
from zerowaste_vae.engine.extras.bench.plots import COLOURS, plots, svg, write_png
from zerowaste_vae.engine.extras.cli import main

drawn = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="drawing needs matplotlib")
PROFILE = {"stages": [{"name": "up & down", "ms": 3.0, "floor_ms": 2.0}, {"name": "rest", "ms": 1, "floor_ms": None}]}


def test_report_file(measured, tmp_path):
    """A report is read as it was written."""
    path = tmp_path / "r.json"
    path.write_text(json.dumps(measured))
    assert schema.read(path) == json.loads(json.dumps(measured))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.pop("schema"), "not a result"),
        (lambda r: r.update(version=99), "version 99"),
        (lambda r: r.pop("rows"), "rows"),
        (lambda r: r.update(environment=[]), "environment"),
        (lambda r: r["rows"].append(3), "row 2"),
        (lambda r: r["rows"][0].pop("median_s"), "median_s"),
        (lambda r: r["rows"][1].update(frames="5"), "row 1: frames"),
        (lambda r: r["rows"][1].update(floor_s=True), "floor_s"),
        (lambda r: r["rows"][0].update(who=None), "who"),
        (lambda r: r["rows"][0].update(half="both"), "row 0: half"),
        (lambda r: r["rows"][0].update(db=float("nan")), "row 0: db"),
        (lambda r: r["rows"][0].update(high_s=float("inf")), "row 0: high_s"),
        (lambda r: r["rows"][0].update(median_s=10**400), "row 0: median_s"),
        (lambda r: r["rows"][0].update(low_s=-1), "row 0: low_s"),
        (lambda r: r["rows"][0].update(frames=0), "row 0: frames"),
        (lambda r: r["rows"][0].update(ms_per_frame=0), "row 0: ms_per_frame"),
        (lambda r: r["rows"][0].update(stated_gb="much"), "row 0: stated_gb"),
        (lambda r: r["rows"][0].update(trace=[[0, 1]]), "row 0: trace"),
        (lambda r: r["rows"][0].update(trace=[[0, 1, None]]), "row 0: trace"),
        (lambda r: r["rows"][0]["ceilings"].pop("copy"), "row 0: ceilings: copy"),
    ],
)
def test_wrong_reports(measured, change, says):
    """A wrong field is named."""
    broken = copy.deepcopy(measured)
    change(broken)
    with pytest.raises(InputError, match=says):
        schema.check(broken, "x.json")


@pytest.mark.parametrize(("field", "value"), [("weights", None), ("widths", None), ("runs", "5"), ("input", 3)])
def test_wrong_settings(measured, tmp_path, field, value):
    """A missing or wrong setting is named."""
    path, settings = tmp_path / "r.json", measured["settings"] | {field: value}
    path.write_text(json.dumps(measured | {"settings": settings}))
    with pytest.raises(InputError, match=rf"r\.json: settings: {field}"):
        schema.read(path)


@pytest.mark.parametrize("text", ["", "[1", "3", "{}", "[" * 100_000])
def test_wrong_files(tmp_path, text):
    """A file that is no report is refused."""
    path = tmp_path / "r.json"
    path.write_text(text)
    for read in (schema.read, schema.read_profile):
        with pytest.raises(InputError, match=r"r\.json"):
            read(path)
    with pytest.raises(InputError, match="no such file"):
        schema.read(tmp_path / "gone.json")


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig"])
def test_profile_file(tmp_path, coding):
    """A profile's stages are checked."""
    path = tmp_path / "p.json"
    path.write_text(json.dumps(PROFILE), encoding=coding)
    assert schema.read_profile(path) == PROFILE
    for ms in ("3", float("nan"), -1, None):
        path.write_text(json.dumps({"stages": [{"name": "x", "ms": ms, "floor_ms": 1}]}))
        with pytest.raises(InputError, match=r"p\.json: stage 0: ms"):
            schema.read_profile(path)


@drawn
def test_plots_by_card(gpu_report):
    """They share neither a speed limit nor a name, whatever they have in common."""
    other, same = copy.deepcopy(gpu_report), copy.deepcopy(gpu_report)
    other["environment"]["gpu"] = "Another GPU"
    alone = plots([gpu_report])
    assert plots([gpu_report, same]).keys() == alone.keys()
    both = plots([gpu_report, other])
    assert len(both) == 2 * len(alone)
    for name, figure in both.items():
        assert ("another-gpu" in name) == ("Another GPU, tiny: " in svg(figure))
    other["environment"]["gpu"], other["settings"]["weights"] = "Made-up GPU", "漢字"
    assert len(plots([gpu_report, other])) == 2 * len(alone)


@drawn
def test_unknown_peaks(measured):
    """A CPU tells the process's memory on some systems only."""
    other = copy.deepcopy(measured)
    for row in measured["rows"]:
        row.update(trace=[[0, 1, 1]], process_gb=1.0)
    for row in other["rows"]:
        row.update(trace=[[0, 1, 1]], process_gb=None, reserved_gb=None)
    assert any("peak - GB" in svg(figure) for figure in plots([measured, other]).values())


def test_table(gpu_report):
    """The table groups rows, and says why one did not run."""
    text = "\n".join(table.lines(gpu_report["rows"]))
    assert text.count("\nspeed limit ") == 3  # two settings, and the peers of the first come again after the second
    assert "did not run: it & its reason" in text and "target 13 GB" in text and "80 %" in text


class Parser(HTMLParser):
    """Collects tags, and attributes that could reach out."""

    def __init__(self):
        super().__init__()
        self.tags, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        reaching = [value for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        self.links += [value for value in reaching if not value.startswith("data:image/svg+xml;base64,")]


@drawn
def test_page(gpu_report):
    """The page is one complete file without scripts or outside requests."""
    figures = plots([gpu_report], PROFILE)
    text = page([gpu_report], figures)
    parser = Parser()
    parser.feed(text)
    assert parser.links == [] and not {"script", "link", "iframe"} & set(parser.tags)
    assert not re.search(r"https?://|@import|url\(", text)
    assert "color-scheme: light dark" in text and "@media print" in text
    assert parser.tags.count("img") == len(figures) == 6
    assert "did not run: it &amp; its reason" in text and "ComfyUI &lt;0&gt;" in text
    for picture in re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', text):
        assert ElementTree.fromstring(b64decode(picture)).tag.endswith("svg")


@drawn
def test_skipped_rows(gpu_report):
    """A row that did not run is in no plot."""
    drawn = plots([gpu_report])
    assert not any("ComfyUI" in svg(figure) for figure in drawn.values())
    gpu_report["rows"] = gpu_report["rows"][-1:]
    assert plots([gpu_report]) == {}
    assert "did not run" in page([gpu_report], {})


@drawn
def test_cpu_plots(measured):
    """A CPU run has plots of time and of the process's memory."""
    drawn = plots([measured])
    assert any(name.startswith("time-") for name in drawn)
    assert not any(name.startswith("quality") for name in drawn)  # both results equal fp32
    assert "resident memory" in "".join(svg(f) for n, f in drawn.items() if n.startswith("memory")) or not any(
        row["trace"] for row in measured["rows"]
    )


@drawn
def test_png(gpu_report, tmp_path):
    """A picture shows this pack, a peer and the speed limit in their colours."""
    name, figure = next(iter(plots([gpu_report]).items()))
    write_png(figure, tmp_path / f"{name}.png")
    with Image.open(tmp_path / f"{name}.png") as image:
        seen = {"#{:02x}{:02x}{:02x}".format(*pixel[:3]) for _, pixel in image.getcolors(1 << 24)}
    assert {"#ffffff", *(COLOURS[role] for role in ("ours", "peer", "limit"))} <= seen


def test_no_matplotlib(gpu_report, tmp_path, monkeypatch, capsys):
    """Without matplotlib a page ends in one line with the cure, and nothing is written."""
    (tmp_path / "r.json").write_text(json.dumps(gpu_report))
    monkeypatch.setattr(drawing.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "report", str(tmp_path / "r.json"), "--html", str(tmp_path / "p.html")]) == 2
    captured = capsys.readouterr()
    assert "pip install matplotlib" in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert not (tmp_path / "p.html").exists()


@drawn
def test_unnamed_weights(gpu_report):
    """A file of `tune --share` names no weights: the page names the family."""
    gpu_report["settings"]["weights"] = ""
    assert "weights of seedvr2; widths 128" in page([gpu_report], {})


@drawn
def test_projections(gpu_report, measured):
    """Projections are named so, and start from fused runs only."""
    rows = list(projection.project(gpu_report))
    assert [row["card"] for row in rows] == ["RTX 5070 Ti", "RTX 4090", "RTX 3090"]
    for row in rows:
        assert row["projected"] and "median_s" not in row and row["projected_s"] == pytest.approx(row["floor_s"] / 0.8)
        assert projection.line(row).startswith("projected") and row["source"].startswith("derived")
    # 1.395 PFLOP composed at 88 TFLOP/s, and the bytes at 0.896 TB/s
    assert rows[0]["floor_s"] == pytest.approx(16.5, abs=0.2)
    text = page([gpu_report], {})
    assert "not measured" in text and text.count("RTX 4090") == 1
    gpu_report["rows"][0]["fused"] = gpu_report["rows"][2]["fused"] = False
    assert list(projection.project(gpu_report)) == []
    assert list(projection.project(measured)) == []
    with pytest.raises(InputError, match="row 0: who"):
        schema.check({**gpu_report, "rows": rows}, "mixed")


def test_projection_without_rate(gpu_report):
    """A precision without a published rate has no projection."""
    for row in gpu_report["rows"]:
        row["precision"] = "fp8"
    found = {row["card"]: row["skipped"] for row in projection.project(gpu_report)}
    assert found["RTX 3090"] == "no published fp8 rate" and found["RTX 4090"] is None
