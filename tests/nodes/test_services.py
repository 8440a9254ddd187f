"""What this pack page-locks is counted with ComfyUI's: in stubs of hosts with both signatures, and of an old one."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from zerowaste_vae.engine import log
from zerowaste_vae.engine.runtime import pinned
from zerowaste_vae.engine.runtime.pinned import PAGE, POOL, PinnedPool

STUBS = {
    "comfy": {}, "comfy.sd": {}, "comfy.utils": {}, "comfy.model_patcher": {}, "comfy_execution": {},
    "comfy.cli_args": {"LatentPreviewMethod": None, "args": None},
    "comfy_execution.progress": {"get_progress_state": None}, "server": {},
    "comfy_execution.utils": {"get_executing_context": None},
}  # fmt: skip


@pytest.fixture
def host(monkeypatch):
    """host(**names) -> (comfy.model_management with these names, a pool that asks it, addresses that are locked)."""
    locked = []
    cudart = SimpleNamespace(cudaHostRegister=lambda at, size, flags: locked.append(at) or 0,
                             cudaHostUnregister=lambda at: locked.remove(at) or 0)  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(pinned, "PIECE", PAGE)
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(POOL, "ledger", None)
    for name, values in STUBS.items():
        stub = ModuleType(name)
        vars(stub).update(values)
        monkeypatch.setitem(sys.modules, name, stub)
    mm = ModuleType("comfy.model_management")
    monkeypatch.setitem(sys.modules, "comfy.model_management", mm)
    name = "zerowaste_vae.nodes.services"
    before = {each: sys.modules.pop(each, None) for each in (name, "zerowaste_vae.nodes.fit")}

    def make(**names):
        vars(mm).update(names)
        importlib.import_module(name)
        pool = PinnedPool()
        pool.ledger = POOL.ledger
        return mm, pool, locked

    yield make
    for each, module in before.items():
        sys.modules.pop(each, None)
        if module is not None:
            sys.modules[each] = module


def total(mm):
    return mm.TOTAL_PINNED_MEMORY


@pytest.mark.parametrize("kind", ["keeps active ones", "one argument", "a limit alone"])
def test_the_hosts_limit_is_kept(host, caplog, kind):
    """A block of five pieces where there is room for three: the first three are locked, and one line says it. The host
    has them in its count until they are released."""
    asked = []

    def ensure(size, evict_active=True):
        asked.append(evict_active)
        return mm.TOTAL_PINNED_MEMORY + size <= mm.MAX_PINNED_MEMORY

    names = {"keeps active ones": {"ensure_pin_registerable": ensure},
             "one argument": {"ensure_pin_registerable": lambda size: ensure(size)}, "a limit alone": {}}[kind]
    mm, pool, locked = host(TOTAL_PINNED_MEMORY=5 * PAGE, MAX_PINNED_MEMORY=8.5 * PAGE, **names)
    block = pool.take(5 * PAGE)
    assert locked == [block.data_ptr() + i * PAGE for i in range(3)] and total(mm) == 8 * PAGE
    assert set(asked) == {"keeps active ones": {False}, "one argument": {True}, "a limit alone": set()}[kind]
    assert [record.getMessage().count("page-lock as much host memory as they may") for record in caplog.records] == [1]
    block.fill_(1)
    pool.give(block)
    assert pool.take(PAGE) is block and total(mm) == 8 * PAGE  # still locked
    pool.give(block)
    pool.release()
    assert total(mm) == 5 * PAGE and not locked and pool.nbytes == 0


def test_what_cuda_refuses_is_not_counted(host, monkeypatch, caplog):
    limit = {"MAX_PINNED_MEMORY": 100 * PAGE, "ensure_pin_registerable": lambda size: True}
    mm, pool, _ = host(TOTAL_PINNED_MEMORY=0, **limit)
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *_: 2)
    pool.give(pool.take(3 * PAGE))
    assert total(mm) == 0 and "refuses to page-lock host memory" in caplog.text
    pool.release()
    assert total(mm) == 0


@pytest.mark.parametrize("names", [{}, {"TOTAL_PINNED_MEMORY": 0, "MAX_PINNED_MEMORY": -1,
                                        "ensure_pin_registerable": lambda size, evict_active=True: False}])  # fmt: skip
def test_a_host_that_locks_nothing(host, names):
    """An old one, and one whose limit is none: the system alone decides."""
    mm, pool, locked = host(**names)
    pool.give(pool.take(4 * PAGE))
    assert len(locked) == 4 and getattr(mm, "TOTAL_PINNED_MEMORY", None) == (4 * PAGE if names else None)
    pool.release()
    assert not locked and getattr(mm, "TOTAL_PINNED_MEMORY", None) == (0 if names else None)


@pytest.mark.parametrize(("platform", "cure"), [("win32", "Windows grants about half of all"), ("linux", "ulimit -l")])
def test_a_refusal_has_the_systems_own_cure(monkeypatch, caplog, platform, cure):
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(sys, "platform", platform)
    pinned._refused("by a test")
    assert cure in caplog.text and caplog.text.count("page-lock") == 1
    assert ("ulimit" in caplog.text) == (platform == "linux")


@pytest.mark.parametrize("has", [True, False])
def test_a_host_shows_what_a_node_does(host, monkeypatch, has):
    """If it can: with the lines that name it, until the next one."""
    host()
    services, sent, shown = sys.modules["zerowaste_vae.nodes.services"], [], []
    show = {"set_activity": lambda node, activity: shown.append((node, activity))} if has else {}
    monkeypatch.setattr(services, "get_progress_state", lambda: SimpleNamespace(**show))
    monkeypatch.setattr(services, "get_executing_context", lambda: SimpleNamespace(node_id="7"))
    instance = SimpleNamespace(client_id="tab", send_sync=lambda *message: sent.append(message))
    sys.modules["server"].PromptServer = SimpleNamespace(instance=instance)
    services.say_here("making room", activity="loading")
    services.say_here("")
    services.say_here("planning")
    assert shown == ([("7", "loading"), ("7", None)] if has else [])
    lines = [(services.PROGRESS, {"node": "7", "text": text}, "tab") for text in ("making room", "planning")]
    assert sent == lines
