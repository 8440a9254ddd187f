"""The dry run counts what a program really holds."""

import torch
from zerowaste_vae.engine.planning.dryrun import peak_bytes


def meta(*shape):
    return torch.empty(*shape, device="meta")


def test_counts_live_tensors_only():
    def program():
        a = meta(1000)
        b = a + 1
        del a
        c = b * 2
        return c.view(10, 100)[3:].sum()

    # b and c live together, with the sum's one value; a is gone by then.
    assert peak_bytes(program) == 8004


def test_a_view_holds_its_storage():
    def program():
        small = meta(1000)[:1]
        return small, meta(500)

    assert peak_bytes(program) == 6000


def test_convolution_holds_a_second_layout():
    def program():
        torch.nn.functional.conv3d(meta(1, 2, 4, 4, 4), meta(3, 2, 1, 1, 1))

    tensors = 4 * (2 * 64 + 3 * 2)
    out = 4 * 3 * 64
    assert peak_bytes(program) == tensors + out + tensors + out


def test_attention_has_no_score_matrix():
    def program():
        q = meta(1, 1, 5000, 8)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    assert peak_bytes(program) == 2 * 5000 * 8 * 4


def test_inference_mode():
    """In inference mode torch hands composite operators over whole, and their temporaries would go unseen."""

    def program():
        torch.nn.functional.conv3d(meta(1, 2, 4, 4, 4), meta(3, 2, 1, 1, 1))

    with torch.inference_mode():
        inside = peak_bytes(program)
    assert inside == peak_bytes(program)
