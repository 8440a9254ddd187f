"""Products are repeated k times on the average, with a zero operand, and nothing else of a text changes."""

import re

import pytest
from zerowaste_vae.engine.extras.bench.ratio.text import RatioError, repeated

HEAD = ".version 8.5\n.visible .entry k(.param .u64 p)\n{\n.reg .b32 %r<99>;\n"
OPERATIONS = {
    "f32": ("m16n8k16.row.col.f32.bf16.bf16.f32", 4), "f16": ("m16n8k16.row.col.f16.f16.f16.f16", 2),
    "s32": ("m16n8k32.row.col.satfinite.s32.s8.s8.s32", 4),
}  # fmt: skip


def product(kind, number=0, operation=None):
    name, width = OPERATIONS[kind]
    sums = ", ".join(f"%r{10 + number * width + i}" for i in range(width))
    return f"mma.sync.aligned.{operation or name} {{ {sums} }}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{ {sums} }};"


def text(*lines):
    return HEAD + "\n".join(lines) + "\nret;\n}\n"


def k(**factors):
    return {"f32": 1.0, "f16": 1.0, "s32": 1.0} | factors


@pytest.mark.parametrize("kind", list(OPERATIONS))
@pytest.mark.parametrize(("factor", "count"), [(4.79, 192), (2.41, 64), (1.0, 7), (2.0, 1)])
def test_as_many_products_as_asked(kind, factor, count):
    given = text(*(product(kind, n % 16) for n in range(count)))
    made = repeated(given, k(**{kind: factor}), "a kernel")
    assert made.before[kind] == count and abs(made.after[kind] - factor * count) <= 0.5
    assert made.text.count("mma.sync") == made.after[kind]
    more = [line for line in made.text.split("\n") if line not in given.split("\n")]
    multiplied = [line for line in more if "mma.sync" in line]
    assert len(multiplied) == made.after[kind] - count
    assert all(re.search(r"\{%r1, %r2, %r3, %r4\}, \{(%\w+), \1\}", line) for line in multiplied)
    assert len(more) - len(multiplied) == 3  # the zero's register, and how it is made


def test_repeated_products_leave_room_for_the_sums_to_arrive():
    """Products of the same sums are as far apart as the group is long, where there is one."""
    made = repeated(text(*(product("f32", n) for n in range(8))), k(f32=3.0), "a kernel").text
    sums = [re.search(r"\{([^}]*)\}", line)[1].strip() for line in made.split("\n") if "mma.sync" in line]
    assert len(sums) == 24 and sums[:8] == sums[8:16] == sums[16:] and len(set(sums)) == 8


def test_a_group_ends_before_other_instructions():
    """A store of the sums comes after their repeated products; moves and loads of operands may come between."""
    moved, stored = "mov.b32 %r1, %r2;", "st.global.b32 [%rd1], %r10;"
    lines = repeated(text(product("f32"), moved, product("f32", 1), stored), k(f32=2.0), "a kernel").text.split("\n")
    at = [i for i, line in enumerate(lines) if "mma.sync" in line]
    assert len(at) == 4 and lines.index(moved) == at[0] + 1 and lines.index(stored) > at[-1]


def test_products_that_stand_alone_have_time_between_them():
    """In a loop with other lines between its products each is repeated behind later ones; in others nothing changes."""
    loop = [line for n in range(16) for line in (product("f32", n), "ldmatrix.sync [%r1];", "add.f16x2 %r1, %r2, %r3;")]
    made = repeated(text("LOOP:", *loop, "@%p1 bra LOOP;", product("f32", 20)), k(f32=4.79), "a kernel")
    assert made.before["f32"] == 17 and abs(made.after["f32"] - 4.79 * 17) <= 0.5
    lines = made.text.split("\n")
    sums = [re.search(r"\{([^}]*)\}", line)[1].strip() for line in lines if "mma.sync" in line]
    inside = sums[: sums.index(re.search(r"\{([^}]*)\}", product("f32", 20))[1].strip())]
    assert all(abs(inside.count(one) - 4.79) <= 1 for one in set(inside)) and len(set(inside)) == 16
    assert all(one not in inside[at + 1 : at + 5] for at, one in enumerate(inside))
    between = [len(re.findall("mma.sync", part)) for part in "\n".join(lines).split("ldmatrix")[1:-1]]
    assert set(between) <= {4, 5}


@pytest.mark.parametrize(("line", "words"), [
    (product("s32", operation="m16n8k32.row.col.f32.e4m3.e4m3.f32"), "fp8 cannot be run at a ratio"),
    ("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%r1}, %rd1, %rd2;", "multiplies by wgmma"),
    ("tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p1;", "multiplies by tcgen05"),
    ("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%r1}, {%r2}, {%r3}, {%r4};", "multiplies by wmma"),
    (product("f32", operation="m16n8k8.row.col.f32.tf32.tf32.f32"), "spelt in a way that is not known"),
    (product("f32", operation="m16n8k16.row.col.f32.tf32.tf32.f32"), "spelt in a way that is not known"),
    ("@%p1 " + product("f32"), "spelt in a way that is not known"),
])  # fmt: skip
def test_other_products_are_refused(line, words):
    with pytest.raises(RatioError, match=f"^a kernel: .*{words}"):
        repeated(text(product("f32"), line), k(f32=4.8), "a kernel")


def test_too_few_products_for_a_fraction_are_refused():
    with pytest.raises(RatioError, match=r"its 1 products with s32 sums cannot be 2\.40 times as many"):
        repeated(text(product("s32")), k(s32=2.4), "a kernel")


def test_texts_without_products_stay():
    made = repeated(text("add.s32 %r1, %r2, %r3;", "// wgmma in a comment"), k(f32=4.8), "a kernel")
    assert not any(made.before.values()) and not any(made.after.values())
