"""Products are counted in machine code, and a text whose products went missing is an error."""

import struct

import pytest
from zerowaste_vae.engine.extras.bench.ratio import assemble
from zerowaste_vae.engine.extras.bench.ratio.text import RatioError, repeated
from zerowaste_vae.engine.extras.bench.ratio.unit import text

HMMA, IMMA, OTHER = 0x23C, 0x237, 0x7210
ONES = {"f32": 1.0, "f16": 1.0, "s32": 1.0}


def machine_code(*opcodes):
    """An ELF file of 64 bits with a section of data and one of instructions, 16 bytes each."""
    code = b"".join(struct.pack("<QQ", 0xABCD << 16 | opcode, HMMA) for opcode in opcodes)
    sections = struct.pack("<IIQQQQ", 0, 1, 2, 0, 64, len(code)).ljust(64, b"\0")  # data: never run
    sections += struct.pack("<IIQQQQ", 0, 1, 6, 0, 64, len(code)).ljust(64, b"\0")
    head = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(code))
    head = head.ljust(0x3A, b"\0") + struct.pack("<HH", 64, 2)
    return head.ljust(64, b"\0") + code + sections


@pytest.fixture
def assembler(monkeypatch):
    """Makes as much code of a text as it has products, times `assembler.keeps`."""
    class Fake:
        keeps, calls = 1.0, 0

        def __call__(self, given, sm, device=0, tool=None):
            self.calls += 1
            count = given.count("mma.sync")
            return machine_code(*[HMMA] * (round(count * self.keeps) if count > 12 else count), OTHER)

    fake = Fake()
    monkeypatch.setattr(assemble, "assembled", fake)
    return fake


def test_products_are_counted_in_machine_code():
    assert assemble.products(machine_code(HMMA, OTHER, IMMA, HMMA, 0x7918)) == 3
    with pytest.raises(RatioError, match="no machine code of a known form"):
        assemble.products(b"MZ" + bytes(100))


def test_slowed_code_is_kept(assembler, tmp_path):
    made = [assemble.slowed(text("f32"), ONES | {"f32": 4.79}, 90, "k", tmp_path / "new") for _ in range(2)]
    assert made[0] == made[1] and assemble.products(made[0]) == 57 and assembler.calls == 2  # as it is, and repeated
    assert assemble.products(assemble.slowed(text("f32"), ONES, 90, "k", tmp_path / "new")) == 12
    assert assembler.calls == 2 and len(list((tmp_path / "new").iterdir())) == 2


@pytest.mark.parametrize("keeps", [0.5, 0.0, 1.3])
def test_products_that_an_assembler_dropped_or_added_are_an_error(assembler, tmp_path, keeps):
    assembler.keeps = keeps
    with pytest.raises(RatioError, match=r"k: its machine code holds \d+ products and should hold 57"):
        assemble.slowed(text("f32"), ONES | {"f32": 4.79}, 90, "k", tmp_path)
    assert len(list(tmp_path.iterdir())) == 1  # the code as it is; the other is never taken for good


def test_other_spellings_are_an_error():
    """Code whose products were none of those that are counted is not taken for code without any."""
    made = repeated(text("f32"), ONES, "k")
    with pytest.raises(RatioError, match="holds 0 products"):
        assemble.check("k", machine_code(OTHER), machine_code(OTHER), made)


@pytest.mark.skipif(assemble.ptxas() is None, reason="needs ptxas, Triton's or another")
@pytest.mark.parametrize("kind", list(ONES))
def test_no_assembler_folds_the_repeated_products(kind, tmp_path):
    """ptxas unrolls the short loop and not the long one; products are there k times in a turn."""
    factor = {"f32": 4.79, "f16": 2.41, "s32": 2.39}[kind]
    plain, slow = (assemble.slowed(text(kind), ONES | {kind: k}, 90, kind, tmp_path) for k in (1.0, factor))
    assert assemble.products(plain) % 12 == 0 < assemble.products(plain)
    assert assemble.products(slow) == pytest.approx(12 * factor, abs=0.51)


@pytest.mark.skipif(assemble.ptxas() is None, reason="needs ptxas, Triton's or another")
def test_refused_text():
    with pytest.raises(RatioError, match=r"ptxas refuses a kernel: .*error"):
        assemble.assembled(".version 8.0\n.target sm_80\nnonsense\n", 90)
