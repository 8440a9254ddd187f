"""The sets that ship: complete, whole, taken by ptxas; and a warning where they are older than the code."""

import json
import os
import random
import subprocess
import sys
import warnings
from itertools import product
from pathlib import Path

import pytest
from zerowaste_vae.engine.families import ARCHITECTURES, DEFAULT
from zerowaste_vae.engine.kernels.cards import CARDS, FORMS, SHARED_KIB
from zerowaste_vae.engine.kernels.prebuilt.driver import READ_BY
from zerowaste_vae.engine.kernels.prebuilt.keys import Key
from zerowaste_vae.engine.kernels.prebuilt.library import FOLDER, MADE_OF, library
from zerowaste_vae.engine.kernels.targets import prebuilt
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.fusable import half_not_fused, no_8_bit
from zerowaste_vae.engine.planning.launches import missing, needs, use_id
from zerowaste_vae.engine.precision.modes import PRECISIONS

TOOLS = Path(__file__).resolve().parents[4] / "tools"
TYPES = (PRECISIONS["fp16"], PRECISIONS["bf16"])
FAMILIES = [one for one in ARCHITECTURES if one.published]
WAYS = (DEFAULTS, DEFAULTS.switched(off=["composed_upsample"]))
#: Those of the sets that are there.
THERE = [form for form in FORMS if form in library().sets]


@pytest.fixture(scope="module")
def index():
    return json.loads((FOLDER / "index.json").read_bytes())


def test_cards_run_what_is_there():
    """RTX 30 and later have a form at least, older drivers read it, and all of it is small."""
    assert "A" in library().sets and set(library().sets) <= set(FORMS)
    for sm, card in CARDS.items():
        there = [form for form in card.forms if all(name in library().sets for name in MADE_OF[form])]
        assert list(library().serves(sm)) == there and there
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 15_000_000
    sets = json.loads((FOLDER / "index.json").read_bytes())["sets"]
    assert sets["A"]["versions"] == ["8.5"]
    for name, one in sets.items():
        assert one["versions"] and set(one["versions"]) <= READ_BY.keys(), name


@pytest.mark.skipif("B" not in THERE, reason="set B is not here")
def test_fp8_alone_needs_a_newer_driver():
    """Set B's other uses run with CUDA 12.5, and a driver is asked about each by itself."""
    config, versions = DEFAULT.published.config, []
    for kind in (None, "int8", "fp8"):
        use = use_id(DEFAULT, config, "decoder", PRECISIONS["fp16"], DEFAULTS, kind, False)
        versions.append(library().version("B", use, lambda: pytest.fail("B was made for these")))
    assert versions == ["8.5", "8.5", "8.7"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.name)
def test_all_kernels_of_a_family_are_there(family):
    """Set A has all kernels of a family in both 16-bit types; `tools/build_kernels.py --check` asks for every use. Uses
    that the index names are not walked."""
    config = family.published.config
    for half, options, dtype in product(("decoder", "encoder"), WAYS, TYPES):
        program = family.program(half, config)
        if program is None or (half_not_fused(program, dtype) and not program.scales):
            continue
        eight = program.scales or no_8_bit([program], dtype) is None
        for kind in (None, "int8")[: 1 + eight] if options == DEFAULTS or not program.scales else ():
            use = use_id(family, config, half, dtype, options, kind, False)
            assert library().covers("A", use), (half, dtype, options, kind)
    decoder = needs(family, config, "decoder", PRECISIONS[family.native], DEFAULTS, prebuilt("RTX 30", 86, "A"))
    assert missing("A", decoder) is None


@pytest.mark.parametrize("form", [form for form in THERE if form != "A"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.name)
def test_the_usual_uses_of_a_family_are_there(index, family, form):
    """In both 16-bit types, and in 8 bit from there. Texts are looked at below, all of them once."""
    config = family.published.config
    for half, dtype in product(("decoder", "encoder"), TYPES):
        program = family.program(half, config)
        if program is None or (half_not_fused(program, dtype) and not program.scales):
            continue
        eight = program.scales or no_8_bit([program], dtype) is None
        for kind in (None, "int8", "fp8")[: 1 + 2 * eight]:
            use = use_id(family, config, half, dtype, DEFAULTS, kind, False)
            assert library().covers(form, use), (half, dtype, kind)
            assert index["sets"][form]["covers"][use]
            assert family is not DEFAULT or library().texts(form, use)


def sample(form, count):
    """Some kernels of a set, the same ones each time."""
    index = json.loads((FOLDER / "index.json").read_bytes())
    places = index["sets"][form]["kernels"]
    return random.Random(form).sample(sorted(places), min(count, len(places))), places


@pytest.mark.parametrize("form", THERE)
def test_every_part_is_whole(index, form):
    """The index says of each kernel the same as its text. In the order of parts: each is unpacked once."""
    for part, at, length, shared, warps, maps in sorted(index["sets"][form]["kernels"].values()):
        text = library()._text(form, part)[at : at + length].decode("ascii")
        assert text.startswith(".version ") and text.endswith("}\n") and text.count(".entry") == 1
        assert f".reqntid {32 * warps}\n" in text and shared <= SHARED_KIB << 10
        assert text.count(".b8 ") >= len(maps)
    known = {kind: size for _, kind, size, _ in index["maps"]}
    assert known.items() <= {0: 1, 6: 2, 9: 2}.items()  # uint8, fp16 and bf16, in bytes


def run(code, *arguments):
    """In a process without Triton's interpreter, which would take the kernels' place."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TOOLS), *sys.path])
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_ptxas_takes_a_sample_for_every_card(tmp_path):
    """Triton's, without spills."""
    pytest.importorskip("triton", reason="its ptxas is Triton's")
    texts = {}
    for form in THERE:
        digests, places = sample(form, 16)
        for part, at, length, *_ in map(places.get, digests):
            texts.setdefault(form, []).append(library()._text(form, part)[at : at + length].decode("ascii"))
    code = (
        "import json, sys, lower_kernels\n"
        "for form, texts in json.load(open(sys.argv[1])).items():\n"
        "    for text in texts:\n"
        "        for sm in lower_kernels.CARDS[form]:\n"
        "            made = lower_kernels.assembled(text, sm)\n"
        "            print(json.dumps([form, sm, made.spilled, made.refused]))\n"
    )
    (tmp_path / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    found = list(map(json.loads, run(code, str(tmp_path / "texts.json")).splitlines()))
    assert len(found) > 100 and [one for one in found if one[2] or one[3]] == []


def test_older_code_is_warned_of():
    """Not a failure: sets are rebuilt last. Other versions of Triton lower to other code, and are not asked."""
    triton = pytest.importorskip("triton")
    index = json.loads((FOLDER / "index.json").read_bytes())
    assert all(Key(*one[:3]).kernel for samples in index["samples"].values() for one in samples)
    if triton.__version__ != library().triton:
        pytest.skip(f"Triton {triton.__version__} is here, sets are made with {library().triton}")
    code = (
        "import kernels_checked\n"
        "from zerowaste_vae.engine.kernels.prebuilt.library import FOLDER, Library\n"
        "print('\\n'.join(kernels_checked.stale(FOLDER, list(Library().sets))))\n"
    )
    if stale := run(code).strip():
        warnings.warn(f"the prebuilt kernels are older than the code: {stale}", stacklevel=1)
