"""The builder of the prebuilt kernels: what it packs is what it read, twice the same bytes, and its check finds what is
wrong. Nothing is compiled here but one small kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from zerowaste_vae.engine.kernels.prebuilt.keys import takes
from zerowaste_vae.engine.kernels.prebuilt.library import Library

pytest.importorskip("triton", reason="sets are built with Triton")
TOOLS = Path(__file__).resolve().parents[2] / "tools"
FEW = frozenset({"minimaxh3"})


@pytest.fixture(scope="module")
def tool(load_tool):
    """Load the tool, which remembers what two sets hold, walked once."""
    made, walks = load_tool("build_kernels"), sys.modules["kernels_wanted"]
    for name in "AB":
        walks.walked(name, FEW)
    return made


@pytest.fixture
def compiler(tool, monkeypatch):
    """In place of Triton's: texts that name their key. Its `wrong` is what assembling says."""
    lower = sys.modules["lower_kernels"]

    class Compiler:
        wrong = None
        code = "0"

    made = Compiler()

    def lowered(key, name):
        maps = ((2, 6, 2, (64, 32)),) * takes(key).count("map")
        return lower.Lowered(f"{name} {key}\n", 1024, 4, maps)

    monkeypatch.setattr(lower, "lowered", lowered)
    monkeypatch.setattr(lower, "source", lambda key, name: f"{key.digest}-{made.code}")
    monkeypatch.setattr(lower, "code", lambda key, name: made.code)
    monkeypatch.setattr(lower, "assembled", lambda text, sm: made.wrong)
    monkeypatch.setattr(lower, "VERSION", lower.triton.__version__)
    return made


@pytest.fixture(scope="module")
def wanted(tool):
    return sys.modules["kernels_wanted"].wanted("A", FEW)


def test_what_is_packed_is_read_again(tool, compiler, wanted, tmp_path):
    assert tool.build(tmp_path / "one", ["A", "B"], FEW, map) == []
    library = Library(tmp_path / "one")
    read, first = library.kernels("B", wanted), sys.modules["kernels_wanted"].first()
    assert len(read) > 50 and all(one.ptx.decode() in (f"A {key}\n", f"B {first}\n") for key, one in read.items())
    tool.build(tmp_path / "two", ["A", "B"], FEW, map)
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert first == second and "A.minimaxh3-int8.xz" in first and "B.minimaxh3-fp8.xz" in first


def test_the_check_finds_what_is_wrong(tool, compiler, wanted, tmp_path):
    tool.build(tmp_path, ["A"], FEW, map)
    assert tool.check(tmp_path, ["A"], FEW, map) == []
    compiler.wrong = "8 bytes spilled on sm_86"
    found = tool.check(tmp_path, ["A"], FEW, map)
    assert len(found) == 3 * len(wanted) and "spilled" in found[0]
    compiler.wrong, compiler.code = None, "1"
    found = tool.check(tmp_path, ["A"], FEW, map)
    assert len(found) == len({key.kernel for key in wanted}) and "another" in found[0]
    compiler.code, index = "0", json.loads((tmp_path / "index.json").read_text())
    lost, large = sorted(index["sets"]["A"]["kernels"])[:2]
    del index["sets"]["A"]["kernels"][lost]
    index["sets"]["A"]["kernels"][large][3] = 100 << 10
    (tmp_path / "index.json").write_text(json.dumps(index))
    lacks, takes_more = tool.check(tmp_path, ["A"], FEW, map)
    assert "lacks" in lacks and "shared memory" in takes_more


def test_what_cannot_be_compiled_is_left_out_and_said(tool, compiler, wanted, tmp_path, monkeypatch):
    lower, bad = sys.modules["lower_kernels"], next(iter(wanted))
    lowered = lower.lowered

    def failing(key, name):
        if key == bad:
            raise lower.LoweringError("it takes a thumb")
        return lowered(key, name)

    monkeypatch.setattr(lower, "lowered", failing)
    assert tool.build(tmp_path, ["A"], FEW, map) == [f"set A goes without {bad}: it takes a thumb"]
    assert not Library(tmp_path).has("A", bad)
    assert tool.check(tmp_path, ["A"], FEW, map) == [f"set A lacks {bad}"]
    walks = sys.modules["kernels_wanted"].walked("A", FEW)
    for way, (_, keys) in walks.items():
        assert [Library(tmp_path).covers("A", use) for use in way.ids()] == [bad not in keys] * 2 or way.kind
    assert any(bad in keys for _, keys in walks.values()) and not all(bad in keys for _, keys in walks.values())


def test_what_was_compiled_before_is_not_compiled_again(tool, compiler, wanted, tmp_path, monkeypatch):
    """Not after a build that was ended, and after a change only what it changed."""
    lower, asked = sys.modules["lower_kernels"], []
    lowered = lower.lowered

    def counted(key, name):
        if len(asked) == 20:
            raise KeyboardInterrupt
        asked.append(key)
        return lowered(key, name)

    monkeypatch.setattr(lower, "lowered", counted)
    with pytest.raises(KeyboardInterrupt):
        tool.build(tmp_path / "one", ["A"], FEW, map, tmp_path / "cache")
    monkeypatch.setattr(lower, "lowered", lambda key, name: asked.append(key) or lowered(key, name))
    tool.build(tmp_path / "one", ["A"], FEW, map, tmp_path / "cache")
    assert len(asked) == len(set(asked)) == len(wanted)
    tool.build(tmp_path / "two", ["A"], FEW, map, tmp_path / "cache")
    tool.build(tmp_path / "three", ["A"], FEW, map)
    assert len(asked) == 2 * len(wanted)
    first, *others = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("one", "two", "three"))
    assert others == [first, first]
    compiler.code = "1"
    tool.build(tmp_path / "two", ["A"], FEW, map, tmp_path / "cache")
    assert len(asked) == 3 * len(wanted)


def test_the_tests_models_are_added_to_a_copy(tool, compiler, tmp_path, monkeypatch):
    """With what is there already, and its numbers."""
    monkeypatch.setattr(tool, "FOLDER", tmp_path / "sets")
    monkeypatch.setattr(tool, "Library", lambda: Library(tmp_path / "sets"))
    tool.build(tmp_path / "sets", ["A", "B"], FEW, map)
    before = Library(tmp_path / "sets")
    with pytest.raises(SystemExit):
        tool.main(["--tests", "--out", str(tmp_path / "sets")])
    known = sorted(sys.modules["kernels_wanted"].wanted("A", FEW), key=str)
    new = [key._replace(kernel="probe.doubling_kernel", constants=(("N", n),)) for n, key in enumerate(known[:3])]
    monkeypatch.setattr(sys.modules["kernels_wanted"], "of_tests", lambda name, each: (
        {"one": frozenset([new[0], known[1]])}, {new[1], new[2]}))  # fmt: skip
    assert tool.add_tests(tmp_path / "more", ["A"], None, map) == []
    after = Library(tmp_path / "more")
    assert all(after.kernel("A", key).ptx.decode() == f"A {key}\n" for key in (*known, *new))
    assert not any(before.has("A", key) for key in new)
    assert {text.digest for text in after.texts("A", "one")} == {new[0].digest, known[1].digest}
    for form in "AB":
        uses = [use for way in sys.modules["kernels_wanted"].walked(form, FEW) for use in way.ids()]
        assert any(before.texts(form, use) for use in uses)
        assert all(sorted(before.texts(form, use)) == sorted(after.texts(form, use)) for use in uses)


def test_what_a_half_asks_for_is_covered(tool, compiler, tmp_path):
    """As it is named where it runs; other sizes are not, and are walked there."""
    from zerowaste_vae.engine.archs import by_name
    from zerowaste_vae.engine.options import DEFAULTS, Options
    from zerowaste_vae.engine.planning.launches import use_id

    tool.build(tmp_path, ["A"], FEW, map)
    h3, wan = by_name("minimaxh3"), by_name("wan2.1")
    asked = [(h3, "decoder", "int8"), (h3, "encoder", "int8"), (h3, "encoder", None), (h3, "encoder", "fp8"),
             (wan, "encoder", None)]  # fmt: skip
    use = [use_id(one, one.published.config, half, torch.float16, DEFAULTS, kind, False) for one, half, kind in asked]
    there = Library(tmp_path)
    assert [there.covers("A", one) for one in use] == [True, True, True, False, False]
    walk = sys.modules["kernels_wanted"].walked("A", FEW)
    for way, (usual, every) in walk.items():
        if there.covers("A", way.ids()[0]):
            texts = there.texts("A", way.ids()[0])
            ready = usual if way.options == Options() else ()
            assert sorted(text.ptx for text in texts) == sorted(there.kernel("A", one).ptx for one in ready)
            assert usual <= every
    assert there.texts("A", use[4]) == []


def test_kernels_that_share_a_form_are_there_once(tool, wanted):
    eight = sys.modules["kernels_wanted"].wanted("B", FEW)
    assert len(eight) > 20 and set(eight) & set(wanted) == {sys.modules["kernels_wanted"].first()}
    assert any(sys.modules["kernels_wanted"].operands(key) == "fp8" for key in eight)


def test_another_triton_is_refused(tool, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys.modules["lower_kernels"].triton, "__version__", "9.9")
    with pytest.raises(SystemExit):
        tool.main(["--out", str(tmp_path)])
    assert "Triton 9.9 is here" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_kernels_are_lowered_and_assembled():
    """With whatever Triton is here, in a process without its interpreter."""
    code = (
        "import kernels_wanted, lower_kernels\n"
        "first = kernels_wanted.first()\n"
        "for name in 'AC':\n"
        "    made = lower_kernels.lowered(first, name)\n"
        "    form = lower_kernels.FORMS[name]\n"
        "    assert f'.version {form.version}\\n.target {form.target}\\n' in made.ptx, made.ptx\n"
        "    assert '//' not in made.ptx and made.warps == 4\n"
        "    assert [lower_kernels.assembled(made.ptx, sm) for sm in form.cards] == [None] * len(form.cards)\n"
        "    assert 'ptxas' in lower_kernels.assembled(made.ptx.replace('ret;', 'rot;'), 86)\n"
        "import torch\n"
        "from zerowaste_vae.engine.archs import by_name\n"
        "from zerowaste_vae.engine.options import DEFAULTS\n"
        "from zerowaste_vae.engine.planning.launches import needs\n"
        "flux = by_name('flux')\n"
        "for dtype, number in ((torch.float16, 6), (torch.bfloat16, 9)):\n"  # CUtensorMapDataType
        "    found = needs(flux, flux.published.config, 'decoder', dtype, DEFAULTS, kernels_wanted.card('C'))\n"
        "    key = min((key for key in found if 'map:' in str(key)), key=str)\n"
        "    made = lower_kernels.lowered(key, 'C')\n"
        "    assert {one[1] for one in made.maps} == {number}, made.maps\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TOOLS), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
