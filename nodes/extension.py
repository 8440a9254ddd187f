"""The pack's entry point for ComfyUI: its nodes, and the routes that the panel asks.

GET /zerowaste_vae/plan: the plan of a decode; it runs nothing on a GPU, and reads at most a listed file's header.
/zerowaste_vae/tune: POST starts a tuning of this GPU, GET returns its state, DELETE ends it.
"""

from __future__ import annotations

import asyncio
import functools
import json
from concurrent.futures import ThreadPoolExecutor

import torch
from aiohttp import web

from ..engine import InputError, errors, log
from . import files
from .compare import Compare
from .decode import Decode, DecodeToVideo
from .drafts import HOST, check, planned
from .encode import Encode, EncodeFromVideo
from .fit import unfit
from .foreign import ForSeedVR2, ForWanVideo
from .host import ComfyExtension, io
from .loader import DemoClip, Loader, Optimize
from .panel import KNOWN, TUNER, Question, answer
from .save import Save
from .services import busy, forgets_files, machine, native_blend, server
from .widgets import CATEGORY

PLAN, TUNE = "/zerowaste_vae/plan", "/zerowaste_vae/tune"
#: Characters of a query, and questions that may wait; both far above what the panel needs.
MAX_QUERY, MAX_WAITING = 2048, 8

# Plans take up to seconds of one CPU core and must not hold up the server's loop; one at a time is enough.
_worker = ThreadPoolExecutor(1, "zerowaste-plan")
_waiting = 0


class Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        # Not in on_load, which hosts before 0.3.65 never call.
        machine()  # sampled now, not at the first request
        KNOWN.forgetful = forgets_files()
        if (routes := getattr(server(), "routes", None)) is not None:
            routes.get(PLAN)(plan)
            for method, handler in (("post", start_tuning), ("get", tuning), ("delete", end_tuning)):
                getattr(routes, method)(TUNE)(handler)
        _name_for_host()
        nodes = [Loader, Optimize, Encode, Decode, EncodeFromVideo, DecodeToVideo, Save, Compare, DemoClip]
        return [_discreet(node) for node in (*nodes, ForWanVideo, ForSeedVR2)]


def _discreet(node: type[io.ComfyNode]) -> type[io.ComfyNode]:
    """Keep the host's folders out of a node's errors: their reader may be on another machine."""
    execute = node.execute.__func__

    @functools.wraps(execute)
    def discreet(cls: type[io.ComfyNode], *given: object, **inputs: object) -> io.NodeOutput:
        try:
            return execute(cls, *given, **inputs)
        except Exception as error:
            files.forget_folders(error)
            raise

    node.execute = classmethod(discreet)
    return node


def _name_for_host() -> None:
    """Give the pack its own name in ComfyUI's log and error dialogs, in place of the path it was loaded from."""
    log.PREFIX = f"[{CATEGORY}]"
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == errors.__name__:
            kind.__module__ = CATEGORY


async def plan(request: web.Request) -> web.Response:
    """Answer 200 with the plan, even if the decode does not fit; 400 on a malformed question; 429 if too many wait."""
    global _waiting
    if len(request.query_string) > MAX_QUERY or len(set(request.query)) != len(request.query):
        return _refused(400, f"a question has at most {MAX_QUERY} characters and each value once")
    try:
        question = Question.parse(request.query)
    except InputError as error:
        return _refused(400, str(error))
    if _waiting >= MAX_WAITING:
        return _refused(429, "the planner is busy: ask again later")
    _waiting += 1
    try:
        return web.json_response(await asyncio.wrap_future(_worker.submit(_answer, question)))
    except InputError as error:
        return _refused(400, str(error))
    finally:
        _waiting -= 1


# The mode in which the host runs nodes: without it a dry run sees other operators, and another peak.
@torch.inference_mode()
def _answer(question: Question) -> dict[str, object]:
    if unfit():
        if question.draft:
            check(HOST)
        return {"unknown": True, "host": True, "model": question.model}
    with log.silent():
        files.learn_checkpoint(question.model)
        return (planned if question.draft else answer)(question, machine(), native_blend)


async def start_tuning(request: web.Request) -> web.Response:
    """Answer 200 with the state; 409 and a reason in one line where it cannot begin; 400 on a malformed question."""
    try:
        # JSON is UTF, even if the header names another encoding.
        model = json.loads(await request.read())["model"] if request.content_length in range(1, MAX_QUERY) else None
    except (ValueError, KeyError, TypeError, RecursionError, ConnectionError, web.RequestPayloadError):
        model = None
    if not isinstance(model, str):
        return _refused(400, "a tuning is asked for with {\"model\": name}")
    try:
        await asyncio.wrap_future(_worker.submit(TUNER.start, model, busy, machine().device))
    except InputError as error:
        return _refused(409, str(error))
    return web.json_response(TUNER.state())


async def tuning(request: web.Request) -> web.Response:
    return web.json_response(TUNER.state())


async def end_tuning(request: web.Request) -> web.Response:
    TUNER.cancel()
    return web.json_response(TUNER.state())


def _refused(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status)
