"""HTTP routes. GET /zerowaste_vae/plan: the plan of a decode; it runs nothing on a GPU, and reads at most a listed
file's header.
/zerowaste_vae/tune: POST starts a tuning of this GPU, GET returns its state, DELETE ends it."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import torch
from aiohttp import web

from ..engine import InputError, log
from . import headers, server
from .machine import machine
from .planning import Question, answer
from .tuning import TUNER

PATH, TUNE = "/zerowaste_vae/plan", "/zerowaste_vae/tune"
#: Characters of a query, and questions that may wait; both far above what the panel needs.
MAX_QUERY, MAX_WAITING = 2048, 8

# Plans take up to seconds of one CPU core and must not hold up the server's loop; one at a time is enough.
_worker = ThreadPoolExecutor(1, "zerowaste-plan")
_waiting = 0


async def plan(request: web.Request) -> web.Response:
    """Answer 200 with the plan, also of a decode that does not fit; 400 on a malformed question; 429 if too many
    wait."""
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
    with log.silent():
        headers.learn_checkpoint(question.model)
        return answer(question, machine())


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
        await asyncio.wrap_future(_worker.submit(TUNER.start, model, server.busy, machine().device))
    except InputError as error:
        return _refused(409, str(error))
    return web.json_response(TUNER.state())


async def tuning(request: web.Request) -> web.Response:
    return web.json_response(TUNER.state())


async def end_tuning(request: web.Request) -> web.Response:
    TUNER.cancel()
    return web.json_response(TUNER.state())


def register() -> None:
    """Add the routes, and sample the machine that they answer from now, not at the first request."""
    machine()
    server.add_route(PATH, plan)
    for method, handler in (("post", start_tuning), ("get", tuning), ("delete", end_tuning)):
        server.add_route(TUNE, handler, method)


def _refused(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status)
