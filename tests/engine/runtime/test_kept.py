"""Memory between two runs: one holder's at most on each device, and nobody's for longer than the holder lives."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from zerowaste_vae.engine.runtime.kept import Kept

CPU, META = torch.device("cpu"), torch.device("meta")


class Holder:
    def __init__(self, nbytes, device=CPU):
        self.nbytes, self.device, self.freed = nbytes, device, 0

    def free(self):
        self.freed += 1


def test_the_holder_takes_it_up_again():
    kept, holder = Kept(), Holder(3)
    kept.keep(holder)
    assert kept.nbytes(CPU) == 3 and kept.nbytes(META) == 0
    assert kept.take(CPU, holder) and not kept.take(CPU, holder)
    assert kept.nbytes(CPU) == 0 and not holder.freed


def test_another_one_and_release_free_it():
    kept, first, second = Kept(), Holder(1), Holder(2)
    kept.keep(first)
    kept.keep(second)
    assert (first.freed, second.freed, kept.nbytes(CPU)) == (1, 0, 2)
    assert not kept.take(CPU, first)
    assert second.freed == 1
    kept.keep(first)
    kept.release()
    kept.release()
    assert first.freed == 2 and kept.nbytes(CPU) == 0


def test_a_holder_that_is_gone_holds_nothing():
    kept = Kept()
    kept.keep(Holder(1))
    assert kept.nbytes(CPU) == 0 and not kept.take(CPU, None)


def test_devices_do_not_take_each_others():
    """Two GPUs of one process, in two threads: neither frees what the other's next call would go on with."""
    kept, here, there = Kept(), Holder(1), Holder(2, META)
    kept.keep(here)
    kept.keep(there)
    assert (kept.nbytes(CPU), kept.nbytes(META)) == (1, 2)
    assert not kept.take(META, None) and (here.freed, there.freed) == (0, 1)
    kept.keep(there)
    kept.release(CPU)
    assert (here.freed, there.freed) == (1, 1)
    assert kept.take(META, there)
    kept.keep(there)
    kept.release()
    assert there.freed == 2


def test_freed_by_another_thread():
    """The memory of a VAE's run, which another VAE's thread wants back just when the first one's next call begins."""
    kept, freeing, go_on = Kept(), threading.Event(), threading.Event()

    class Slow(Holder):
        def free(self):
            freeing.set()
            assert go_on.wait(10)
            super().free()

    holder = Slow(1)
    kept.keep(holder)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(kept.take, CPU, None)
        assert freeing.wait(10)
        own = pool.submit(lambda: (kept.take(CPU, holder), holder.freed))
        threading.Timer(0.2, go_on.set).start()
        assert own.result(10) == (False, 1) and other.result(10) is False
