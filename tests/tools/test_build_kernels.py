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
    """In place of Triton's: texts that name their key. Its `wrong` is what assembling says, `asked` what for."""
    lower = sys.modules["lower_kernels"]

    class Compiler:
        wrong = lower.Assembled(64, 0)
        code = "0"

        def __init__(self):
            self.asked = []

    made = Compiler()

    def lowered(key, name):
        maps = ((2, 6, 2, (64, 32)),) * takes(key).count("map")
        return lower.Lowered(f"{name} {key}\n", 1024, 4, maps)

    monkeypatch.setattr(lower, "lowered", lowered)
    monkeypatch.setattr(lower, "source", lambda key, name: f"{key.digest}-{made.code}")
    monkeypatch.setattr(lower, "code", lambda key, name: made.code)
    monkeypatch.setattr(lower, "assembled", lambda text, sm: made.asked.append((text, sm)) or made.wrong)
    monkeypatch.setattr(lower, "VERSION", sys.modules["lower_kernels"].triton.__version__)
    return made


@pytest.fixture
def checked(compiler):
    return sys.modules["kernels_checked"]


@pytest.fixture(scope="module")
def wanted(tool):
    return sys.modules["kernels_wanted"].wanted("A", FEW)


def test_what_is_packed_is_read_again(tool, compiler, wanted, tmp_path):
    assert tool.build(tmp_path / "one", ["A", "B"], FEW, map) == []
    library = Library(tmp_path / "one")
    read, first = library.kernels("B", wanted), sys.modules["kernels_wanted"].first()
    assert len(read) > 50 and all(one.ptx.decode() in (f"A {key}\n", f"B {first}\n") for key, one in read.items())
    tool.build(tmp_path / "two", ["B", "A"], FEW, map)
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert first == second and "A.minimaxh3-int8.xz" in first and "B.minimaxh3-fp8.xz" in first


def test_the_check_finds_what_is_wrong(tool, compiler, checked, wanted, tmp_path, capsys):
    tool.build(tmp_path, ["A"], FEW, map)
    assert checked.check(tmp_path, ["A"], FEW, map) == []
    assert sorted({sm for _, sm in compiler.asked}) == [80, 86, 89, 120]
    assert len(compiler.asked) == 4 * len(wanted) == len(set(compiler.asked))
    compiler.wrong = checked.Assembled(255, 8)
    found = checked.check(tmp_path, ["A"], FEW, map)
    assert len(found) == 4 * len(wanted) and found[0].endswith("8 bytes spilled on sm_80")
    assert f"set A for sm_89: {len(wanted)} assembled, 0 refused, {len(wanted)} spill" in capsys.readouterr().out
    compiler.wrong = checked.Assembled(0, 0, "ptxas for sm_80: no")
    assert checked.check(tmp_path, ["A"], FEW, map)[0].endswith("ptxas for sm_80: no")
    compiler.wrong, compiler.code = checked.Assembled(64, 0), "1"
    found = checked.check(tmp_path, ["A"], FEW, map)
    assert len(found) == len({key.kernel for key in wanted}) and "another" in found[0]
    compiler.code, index = "0", json.loads((tmp_path / "index.json").read_text())
    lost, large = sorted(index["sets"]["A"]["kernels"])[:2]
    del index["sets"]["A"]["kernels"][lost]
    index["sets"]["A"]["kernels"][large][3] = 100 << 10
    (tmp_path / "index.json").write_text(json.dumps(index))
    *lacks, takes_more = checked.check(tmp_path, ["A"], FEW, map)
    assert lacks and all("form A lacks 1 kernels" in line and "minimaxh3" in line for line in lacks)
    assert "shared memory" in takes_more


def test_a_card_is_asked_for_what_its_form_shares(checked):
    """RTX 50 runs set A's and B's convolutions in forms C and D."""
    from zerowaste_vae.engine.kernels.cards import CARDS, FORMS
    from zerowaste_vae.engine.kernels.prebuilt.library import MADE_OF

    for sm in (80, 86, 89, 120):
        assert all(sm in checked.CARDS[name] for form in CARDS[sm].forms for name in MADE_OF[form])
    assert checked.CARDS.keys() == FORMS.keys() and 90 in checked.CARDS["C"]


def test_a_check_that_was_ended_goes_on(tool, compiler, checked, wanted, tmp_path, monkeypatch):
    """With what was assembled before; refusals are asked again."""
    tool.build(tmp_path / "sets", ["A"], FEW, map)

    def ended(text, sm):
        if len(compiler.asked) == 50:
            raise KeyboardInterrupt
        compiler.asked.append((text, sm))
        return compiler.wrong

    compiler.wrong = checked.Assembled(255, 16)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sys.modules["lower_kernels"], "assembled", ended)
        checked.check(tmp_path / "sets", ["A"], FEW, map, cache=tmp_path / "cache")
    found = checked.check(tmp_path / "sets", ["A"], FEW, map, cache=tmp_path / "cache")
    assert len(compiler.asked) == len(set(compiler.asked)) == len(found) == 4 * len(wanted)
    assert found == checked.check(tmp_path / "sets", ["A"], FEW, map, cache=tmp_path / "cache")
    assert len(compiler.asked) == 4 * len(wanted)
    compiler.wrong = checked.Assembled(0, 0, "ptxas for sm_80: no")
    for _ in range(2):
        checked.check(tmp_path / "sets", ["A"], FEW, map, cache=tmp_path / "refused")
    assert len(compiler.asked) == 3 * 4 * len(wanted)


def test_a_second_build_is_compared(tool, compiler, tmp_path):
    tool.build(tmp_path, ["A"], FEW, map)
    assert tool.differing(tmp_path, ["A"], FEW, map, None) == []
    file = tmp_path / "A.minimaxh3-int8.xz"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert tool.differing(tmp_path, ["A"], FEW, map, None) == [f"{file.name} is not the same bytes in a second build"]
    file.unlink()
    assert tool.differing(tmp_path, ["A"], FEW, map, None) == [f"{file.name} is not the same bytes in a second build"]


def test_what_was_walked_before_is_not_walked_again(tool, tmp_path, monkeypatch):
    """Until the code is another one."""
    walks, walked = sys.modules["kernels_wanted"], []
    use = next(one for one in walks.uses("A", FEW) if one.kind is None)
    launches = walks.Use.launches
    monkeypatch.setattr(walks.Use, "launches", lambda use, here: walked.append(here) or launches(use, here))
    first = walks._launches((use, "A", tmp_path))
    assert walks._launches((use, "A", tmp_path)) == first and len(walked) == 1 and first[0]
    assert walks._launches((use, "A", None)) == first and len(walked) == 2
    monkeypatch.setattr(walks, "_code", lambda: "another")
    assert walks._launches((use, "A", tmp_path)) == first and len(walked) == 3


def test_what_cannot_be_compiled_is_left_out_and_said(tool, compiler, checked, wanted, tmp_path, monkeypatch):
    lower, bad = sys.modules["lower_kernels"], next(iter(wanted))
    lowered = lower.lowered

    def failing(key, name):
        if key == bad:
            raise lower.LoweringError("it takes a thumb")
        return lowered(key, name)

    monkeypatch.setattr(lower, "lowered", failing)
    assert tool.build(tmp_path, ["A"], FEW, map) == [f"set A goes without {bad}: it takes a thumb"]
    assert not Library(tmp_path).has("A", bad)
    lacks = checked.check(tmp_path, ["A"], FEW, map)
    assert lacks and all(line.endswith(str(bad)) for line in lacks)
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


def test_every_test_of_single_kernels_is_launched_without_values(tool, monkeypatch):
    """Those that stop before they launch anything would be skipped where there is no Triton."""
    wanted = sys.modules["kernels_wanted"]
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = wanted.DIRECT
    for module, names in known.items():
        for name in names or ("test_norm_act", "test_conv3d", "test_to_pixels"):
            monkeypatch.setattr(wanted, "DIRECT", {module: (name,)})
            for form in "AC":
                assert wanted.of_kernel_tests(wanted.card(form)), (name, form)
    monkeypatch.setattr(wanted, "DIRECT", known)
    found = {key.kernel for key in wanted.of_kernel_tests(wanted.card("C"))}
    assert found >= {"neighbourhood.neighbourhood_kernel", "blocks.projected_kernel", "blocks.narrow_gated_kernel",
                     "mixing.gates_kernel", "patch_pixels.patch_kernel", "tokens.rounded_kernel"}  # fmt: skip


def test_what_a_half_asks_for_is_covered(tool, compiler, tmp_path):
    """As it is named where it runs; other sizes are not, and are walked there."""
    from zerowaste_vae.engine.families import by_name
    from zerowaste_vae.engine.options import DEFAULTS
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
            ready = usual if way.options == sys.modules["kernels_wanted"].TOGGLES[0] else ()
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


@pytest.mark.parametrize(
    ("usual", "hinted", "takes"), [(0, 0, False), (24, 0, True), (24, 8, True), (24, 24, False), (24, 40, False)]
)
def test_ptxas_may_take_all_registers(tool, monkeypatch, usual, hinted, takes):
    """To let more blocks run at once, it does. Other texts have no hint."""
    lower = sys.modules["lower_kernels"]
    spills = {True: hinted, False: usual}
    monkeypatch.setattr(lower, "assembled", lambda text, sm: lower.Assembled(128, spills["maxnreg" in text]))
    text = ".visible .entry one(\n)\n.reqntid 256\n{\n.reqntid\n}\n"
    more = text.replace("256\n", "256\n.maxnreg 255\n")
    assert lower._unspilled(text, "A", 8) == (more if takes else text)


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
        "    for sm in lower_kernels.CARDS[name]:\n"
        "        taken = lower_kernels.assembled(made.ptx, sm)\n"
        "        assert 0 < taken.registers < 256 and not taken.spilled and not taken.refused\n"
        "    assert 'ptxas' in lower_kernels.assembled(made.ptx.replace('ret;', 'rot;'), 86).refused\n"
        "import torch\n"
        "from zerowaste_vae.engine.families import by_name\n"
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
