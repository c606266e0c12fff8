"""Models in folders, the command line, and a real server on a port of this machine."""

import contextlib
import dataclasses
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

import zero_fn as zf
from zero_fn import tree
from zero_fn.__main__ import main
from zero_fn.inference.model_files import load_model, save_model
from zero_fn.inference.serving import Limits, app
from zero_fn.kernels import Layout
from zero_fn.models import gpt
from zero_fn.models.gpt_decoding import Decoder, decoder

CONFIG = gpt.Config(length=64, width=32, heads=4)
MODEL = decoder(CONFIG)
PROMPT = "héllo "


def params(config: gpt.Config = CONFIG) -> Any:
    return tree.map(lambda x: x * (5 if x.ndim > 1 else 1), gpt.init(config, 1))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(tmp_path / "model", params(), CONFIG)
    return tmp_path / "model"


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_comes_back(tmp_path: Path, tied: bool) -> None:
    config = dataclasses.replace(CONFIG, tied=tied, kv_heads=2, vocabulary=53)
    given = params(config)
    if tied:
        given["head"] = given["tokens"]
    save_model(tmp_path, given, config)
    found, sizes = load_model(tmp_path)
    assert sizes == config
    assert tree.paths(found) == tree.paths(given)
    assert all(map(torch.equal, tree.leaves(found), tree.leaves(given)))
    assert (found["head"] is found["tokens"]) == tied


def test_a_checkpoint_of_another_model(saved: Path, tmp_path: Path) -> None:
    config = saved / "config.json"
    text = config.read_text()
    fields = json.loads(text)
    for changes, message in (
        ({"width": 16}, r"shape \(96, 32\), expected \(48, 16\)"),
        ({"layers": 3}, "no blocks.2"),
        ({"layers": 1}, "unknown blocks.1"),
        ({"model": "llama"}, "configuration of another model"),
        ({"dropout": 0.1}, "a GPT has no dropout"),
        ({"heads": 5}, "does not divide"),
        ({"heads": "four"}, "config.json"),
    ):
        config.write_text(json.dumps(fields | changes))
        with pytest.raises(ValueError, match=message):
            load_model(saved)
    config.write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        load_model(saved)
    config.write_text(text)
    (saved / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="is no safetensors file"):
        load_model(saved)
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="differences"):
        save_model(tmp_path, params(), dataclasses.replace(CONFIG, width=16))
    layout = dataclasses.replace(CONFIG, attention=Layout.dense(64))
    with pytest.raises(ValueError, match="cannot be written"):
        save_model(tmp_path, params(), layout)


def text_of(prompt: str, weights: Any, count: int = 8, **settings: Any) -> str:
    made = zf.generate(MODEL, weights, list(prompt.encode()), max_new_tokens=count, **settings)
    return bytes(made).decode(errors="replace")


def test_the_command_generates(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, _ = load_model(saved)
    given = ["generate", "--checkpoint", str(saved), "--prompt", PROMPT, "--max-new-tokens", "8"]
    assert main(given) == 0
    assert capsys.readouterr().out == text_of(PROMPT, weights) + "\n"
    assert main([*given, "--temperature", "1", "--top-k", "5", "--seed", "3"]) == 0
    drawn = text_of(PROMPT, weights, temperature=1.0, top_k=5, key=zf.random.key(3))
    assert capsys.readouterr().out == drawn + "\n"
    assert main([*given, "--quantize", "int8"]) == 0
    assert capsys.readouterr().out == text_of(PROMPT, zf.quantize(weights)) + "\n"
    assert main([*given[:3], "--tokens", "1, 2", "--dtype", "bfloat16"]) == 0
    assert len(capsys.readouterr().out.split(",")) == 63


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--prompt", ""], "empty prompt"),
        (["--prompt", "x" * 65], "65 tokens is longer"),
        (["--tokens", "256"], "vocabulary has the ids 0 to 255"),
        (["--tokens", "a"], "--tokens a: token ids are numbers"),
        (["--prompt", "a", "--top-k", "3"], "give a temperature"),
    ],
)
def test_the_command_refuses(
    saved: Path, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--checkpoint", str(saved), *given]) == 2
    assert message in capsys.readouterr().err


def test_the_command_without_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--checkpoint", "nowhere", "--prompt", "a"]) == 2
    assert "zero-fn generate: nowhere has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--slots", "0"], "slots is 0"),
        (["--max-queue", "0"], "max_queue is 0"),
        (["--timeout", "-1"], "the limit seconds is -1.0; it is above 0"),
        (["--max-body", "0"], "the limit body is 0"),
        (["--max-new-tokens", "0"], "the limit new_tokens is 0"),
        (["--port", "65536"], "--port 65536: a port is 1 to 65535"),
    ],
)
def test_the_command_does_not_serve(
    saved: Path, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--checkpoint", str(saved), *given]) == 2
    assert message in capsys.readouterr().err


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    def __init__(self, batcher: zf.ContinuousBatcher, limits: Limits) -> None:
        self.port, self.batcher = free_port(), batcher
        config = uvicorn.Config(
            app(batcher, limits), port=self.port, log_level="error", lifespan="off"
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 20
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def ask(self, body: Any, method: str = "POST", path: str = "/generate") -> tuple[int, Any]:
        with contextlib.closing(self.connection()) as connection:
            data = body if isinstance(body, bytes | None) else json.dumps(body)
            connection.request(method, path, data)
            answer = connection.getresponse()
            text = answer.read().decode()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)


@contextlib.contextmanager
def serving(model: Decoder = MODEL, limits: Limits | None = None, **made: Any) -> Iterator[Server]:
    with zf.ContinuousBatcher(model, params(), **made) as batcher:
        server = Server(batcher, limits or Limits(body=2000, new_tokens=32))
        yield server
        server.stop()


def test_answers_and_streams() -> None:
    with serving(slots=8) as server:
        assert server.ask(None, "GET", "/health") == (200, {"status": "ok"})
        want = text_of(PROMPT, params(), 12)
        asked = {"prompt": PROMPT, "max_new_tokens": 12}
        status, answer = server.ask(asked)
        assert (status, answer["text"]) == (200, want)
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda _: server.ask(asked), range(16)))
        assert all(answer["text"] == want for _, answer in answers)
        status, text = server.ask({**asked, "stream": True})
        lines = [json.loads(line) for line in text.splitlines()]
        assert lines.pop() == {"done": True}
        assert [line["token"] for line in lines] == answers[0][1]["tokens"]
        drawn = {"tokens": [1, 2], "temperature": 1, "top_p": 0.9, "seed": 7, "max_new_tokens": 9}
        key = zf.random.key(7)
        assert server.ask(drawn)[1]["tokens"] == zf.generate(
            MODEL, params(), [1, 2], max_new_tokens=9, temperature=1.0, top_p=0.9, key=key
        )
        status, metrics = server.ask(None, "GET", "/metrics")
        assert metrics["answered"] == 19


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "no JSON"),
        ([1], 400, "a JSON object"),
        ({}, 400, "either prompt"),
        ({"prompt": "a", "tokens": [1]}, 400, "either prompt"),
        ({"prompt": ""}, 400, "empty prompt"),
        ({"prompt": 3}, 400, "prompt is 3; it is of type str"),
        ({"prompt": "a", "max_new_tokens": True}, 400, "of type int"),
        ({"prompt": "a", "max_tokens": 3}, 400, "no field 'max_tokens'"),
        ({"prompt": "a", "max_new_tokens": 33}, 400, "this server makes 32"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature is -1"),
        ({"prompt": "a" * 65}, 400, "longer than the model"),
        ({"tokens": [256]}, 400, "vocabulary"),
        ({"tokens": ["a"]}, 400, "token ids"),
        ({"tokens": [1], "stop": [[1]]}, 400, "stop"),
        ({"tokens": [1], "temperature": 1, "seed": 2**70}, 400, "64 bits"),
        ({"prompt": "a" * 3000}, 413, "more than 2000 bytes"),
    ],
)
def test_bad_requests(shared: Server, body: Any, status: int, message: str) -> None:
    for stream in ({}, {"stream": True}):
        found, answer = shared.ask(body | stream if isinstance(body, dict) else body)
        assert found == status
        assert message in answer["error"]


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with serving() as server:
        yield server


def test_other_paths(shared: Server) -> None:
    assert shared.ask(None, "GET", "/generate")[0] == 405
    assert shared.ask(None, "GET", "/")[0] == 404


def test_full_queues_time_outs_and_clients_that_vanish() -> None:
    begun, go = threading.Event(), threading.Event()

    def decode(*args: Any) -> Any:
        begun.set()
        assert go.wait(20)
        time.sleep(0.02)
        return MODEL.decode(*args)

    limits = Limits(2000, 32, seconds=1.0)
    with serving(MODEL._replace(decode=decode), limits, slots=1, max_queue=1) as server:
        gone = server.connection()
        gone.request("POST", "/generate", json.dumps({"prompt": "a", "stream": True}))
        assert begun.wait(20)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.ask, {"prompt": "b"})
            while not server.batcher.metrics().waiting:
                time.sleep(0.01)
            status, answer = server.ask({"prompt": "c"})
            assert status == 503
            assert "1 requests wait" in answer["error"]
            time.sleep(1.0)
            go.set()
            status, answer = waiting.result(20)
            assert status == 504
            assert "in the queue" in answer["error"]
        gone.close()
        first = server.connection()
        first.request("POST", "/generate", json.dumps({"prompt": "a", "stream": True}))
        with contextlib.closing(first.getresponse()) as answer:
            answer.readline()
        first.close()
        second = server.connection()
        second.request("POST", "/generate", json.dumps({"prompt": "a"}))
        time.sleep(0.05)
        second.close()
        deadline = time.monotonic() + 10
        while server.batcher.metrics().cancelled < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.batcher.metrics().cancelled == 2
        assert server.ask({"prompt": "d", "max_new_tokens": 2})[0] == 200


def test_the_command_serves_this_machine_only(saved: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "zero_fn", "serve", "--checkpoint", str(saved)]
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline
            with contextlib.suppress(ConnectionError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                connection.request("POST", "/generate", json.dumps({"prompt": "a"}))
                assert len(json.loads(connection.getresponse().read())["tokens"]) == 64
                connection.close()
                break
            time.sleep(0.1)
        other = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False)
        for address in other.stdout.split()[:1]:
            with (
                pytest.raises(ConnectionRefusedError),
                socket.create_connection((address, port), timeout=2),
            ):
                pass
    finally:
        process.terminate()
        process.communicate(timeout=20)
