"""The route behind the tuning button of Optimize, over HTTP, without a GPU: it says why not, and does nothing."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request

import pytest
import torch

pytestmark = [pytest.mark.host, pytest.mark.skipif(torch.cuda.is_available(), reason="it would begin to tune")]


def ask(comfy, method: str, body: bytes | None = None) -> tuple[int, dict]:
    url = f"http://127.0.0.1:{comfy.port}/zerowaste_vae/tune"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read())


IDLE = {"state": "idle", "done": 0, "total": 0, "text": ""}


def test_without_a_gpu_it_says_why_in_a_line(comfy):
    assert ask(comfy, "GET") == (200, IDLE)
    status, body = ask(comfy, "POST", json.dumps({"model": "demo (small)"}).encode())
    assert status == 409
    assert body["error"] == "tuning needs a CUDA GPU: a CPU runs torch's own operators"
    assert ask(comfy, "DELETE") == ask(comfy, "GET") == (200, IDLE)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"{}", b'{"model": 3}', b'{"model": "' + 5000 * b"a" + b'"}', 2000 * b"[", b'{"model": "\xff"}'],
    ids=lambda body: ascii(body[:16]),
)
def test_malformed_questions_get_400(comfy, body):
    status, answer = ask(comfy, "POST", body)
    assert status == 400 and answer["error"]


def test_closed_connection_is_no_server_error(comfy):
    """A connection may close before its request is complete."""
    before = comfy.log().count("Traceback")
    with socket.create_connection(("127.0.0.1", comfy.port)) as gone:
        gone.sendall(b"POST /zerowaste_vae/tune HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    time.sleep(0.5)
    assert ask(comfy, "GET") == (200, IDLE)
    assert comfy.log().count("Traceback") == before


@pytest.mark.parametrize("header", ["Content-Type: application/json; charset=nonsense", "Content-Encoding: gzip"])
def test_headers_that_are_wrong_end_in_no_500(comfy, header):
    name, value = header.split(": ")
    url, body = f"http://127.0.0.1:{comfy.port}/zerowaste_vae/tune", b'{"model": "demo (small)"}'
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, body, {name: value}, method="POST"), timeout=60)
    assert refused.value.code in (400, 409) and json.loads(refused.value.read())["error"]
