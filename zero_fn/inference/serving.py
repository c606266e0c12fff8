"""A small HTTP server: continuations of prompts, whole or as a stream, and figures.

    POST /generate   {"prompt": "text"} or {"tokens": [1, 2]}, with max_new_tokens, temperature,
                     top_k, top_p, seed (0 unless given), stop (token ids), stream
    GET  /health     {"status": "ok"}
    GET  /metrics    the batcher's figures

A stream is a JSON object a line: ``{"token": 65, "text": "A"}``, and ``{"done": true}`` or
``{"error": "..."}`` as the last. Text is for models of bytes (a vocabulary of 256); others take and
give token ids. A client that goes away frees its place.

The server is Starlette's and Uvicorn's, the extra ``serve``. It asks nobody who they are: it is for
this machine, or behind a proxy that does.
"""

import asyncio
import codecs
import contextlib
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import random
from ..models.decoding import Decoder
from .continuous import ContinuousBatcher
from .requests import Closed, QueueFull

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

BYTES = 256  # the vocabulary of a model of bytes


class Limits(NamedTuple):
    """What a request may ask.

    Attributes:
        body: bytes of the request.
        new_tokens: tokens that it may make. Where it does not say, as many are made, or those that
            the model's length allows.
        seconds: how long it may take, its wait included.
    """

    body: int = 1 << 20
    new_tokens: int = 256
    seconds: float = 60.0


FIELDS: dict[str, tuple[type, ...]] = {
    "prompt": (str,),
    "tokens": (list,),
    "max_new_tokens": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "seed": (int,),
    "stop": (list,),
    "stream": (bool,),
}


def app(batcher: ContinuousBatcher, limits: Limits | None = None) -> "Starlette":
    """The server's application, for Uvicorn or any other ASGI server.

    Args:
        batcher: what generates.
        limits: what a request may ask.

    Raises:
        ValueError: for a limit that is not above 0.
        ModuleNotFoundError: without Starlette.
    """
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    bounds, vocabulary = limits or Limits(), batcher.decoder.vocabulary
    for name, value in bounds._asdict().items():
        if not value > 0:
            raise ValueError(f"the limit {name} is {value}; it is above 0")

    async def generate(request: "Request") -> "Response":
        try:
            fields = await _fields(request, bounds)
            prompt, settings, streamed = _asked(fields, batcher.decoder, bounds)
            if streamed:
                return _streamed(batcher.astream(prompt, **settings), vocabulary)
            tokens = await _unless_gone(request, batcher.ask(prompt, **settings))
        except Exception as error:
            return _refusal(error)
        text = {"text": bytes(tokens).decode(errors="replace")} if vocabulary == BYTES else {}
        return JSONResponse({**text, "tokens": tokens})

    async def health(request: "Request") -> "Response":
        return JSONResponse({"status": "ok"})

    async def metrics(request: "Request") -> "Response":
        return JSONResponse(batcher.metrics()._asdict())

    return Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/health", health),
            Route("/metrics", metrics),
        ]
    )


class _TooLarge(ValueError):
    pass


class _Gone(Exception):
    pass


async def _fields(request: "Request", limits: Limits) -> dict[str, Any]:
    """The request's JSON object, read no further than the limit."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > limits.body:
            raise _TooLarge(f"the request has more than {limits.body} bytes")
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise ValueError(f"the request is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError('the request is a JSON object, such as {"prompt": "text"}')
    for name, value in fields.items():
        if name not in FIELDS:
            raise ValueError(f"no field {name!r}; there are {', '.join(FIELDS)}")
        wanted = FIELDS[name]
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            names = " or ".join(kind.__name__ for kind in wanted)
            raise ValueError(f"{name} is {value!r}; it is of type {names}")
    return fields


def _asked(
    fields: dict[str, Any], model: Decoder, limits: Limits
) -> tuple[list[int], dict[str, Any], bool]:
    """The prompt, the settings of its generation, and whether it is streamed."""
    if ("prompt" in fields) == ("tokens" in fields):
        raise ValueError("give either prompt, a text, or tokens, a list of token ids")
    if "prompt" in fields and model.vocabulary != BYTES:
        raise ValueError(
            f"the model has a vocabulary of {model.vocabulary} tokens, not of bytes; give tokens"
        )
    prompt = list(fields["prompt"].encode()) if "prompt" in fields else fields["tokens"]
    room = max(model.length - len(prompt) + 1, 1)
    count = fields.get("max_new_tokens", min(limits.new_tokens, room))
    if count > limits.new_tokens:
        raise ValueError(f"max_new_tokens is {count}; this server makes {limits.new_tokens}")
    settings: dict[str, Any] = {
        name: fields[name] for name in ("temperature", "top_k", "top_p") if name in fields
    }
    if settings.get("temperature"):
        settings["key"] = random.key(fields.get("seed", 0))
    stop = fields.get("stop", [])
    return (
        prompt,
        {**settings, "stop": stop, "max_new_tokens": count, "timeout": limits.seconds},
        fields.get("stream", False),
    )


async def _unless_gone(request: "Request", answer: Any) -> list[int]:
    """The answer, given up when the client goes away."""
    task = asyncio.ensure_future(answer)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=0.1)
            if not task.done() and await request.is_disconnected():
                raise _Gone
        return task.result()
    finally:
        task.cancel()


def _streamed(tokens: AsyncIterator[int], vocabulary: int) -> "Response":
    from starlette.responses import StreamingResponse

    async def lines() -> AsyncIterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        async with contextlib.aclosing(tokens):  # type: ignore[type-var]
            try:
                async for token in tokens:
                    line: dict[str, Any] = {"token": token}
                    if vocabulary == BYTES:
                        line["text"] = decoder.decode(bytes([token]))
                    yield json.dumps(line) + "\n"
                yield json.dumps({"done": True}) + "\n"
            except Exception as error:
                yield json.dumps({"error": str(error)}) + "\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _refusal(error: Exception) -> "Response":
    from starlette.responses import JSONResponse

    status, headers = 500, {}
    if isinstance(error, QueueFull | Closed):
        status, headers = 503, {"Retry-After": "1"}
    elif isinstance(error, _TooLarge):
        status = 413
    elif isinstance(error, TimeoutError):
        status = 504
    elif isinstance(error, ValueError | TypeError):
        status = 400
    elif isinstance(error, _Gone):
        status = 499
    return JSONResponse({"error": str(error)}, status_code=status, headers=headers)
