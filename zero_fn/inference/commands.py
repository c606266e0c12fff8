"""``zero-fn generate`` and ``zero-fn serve``."""

import argparse
import sys
from pathlib import Path
from typing import Any

COMMANDS = ("generate", "serve")


def add_commands(commands: Any) -> None:
    """Add the two to a parser's commands."""
    generate = commands.add_parser(
        "generate",
        help="continue a prompt with a trained model",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_model(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the text to continue, for a model of bytes")
    prompt.add_argument("--tokens", help="token ids to continue, with commas between")
    generate.add_argument(
        "--max-new-tokens", type=int, help="tokens to make; all that fit if unset"
    )
    generate.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    generate.add_argument("--top-k", type=int, help="draw among so many of the likeliest tokens")
    generate.add_argument(
        "--top-p", type=float, help="draw among the likeliest of this probability"
    )
    generate.add_argument("--seed", type=int, default=0, help="what draws are made from")
    serve = commands.add_parser(
        "serve",
        help="answer prompts over HTTP",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_model(serve)
    serve.add_argument("--host", default="127.0.0.1", help="the address; this machine only")
    serve.add_argument("--port", type=int, default=8000, help="0: any that is free")
    serve.add_argument("--slots", type=int, default=32, help="sequences generated at once")
    serve.add_argument("--max-queue", type=int, default=256, help="requests that may wait")
    serve.add_argument("--max-new-tokens", type=int, default=256, help="tokens of a request")
    serve.add_argument("--max-body", type=int, default=1 << 20, help="bytes of a request")
    serve.add_argument("--timeout", type=float, default=60.0, help="seconds of a request")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        help="a folder of `demo --save`, or that save_model wrote",
    )
    parser.add_argument("--quantize", choices=("int8", "int4", "fp8"), help="quantise the weights")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of what is computed"
    )


def run(given: dict[str, Any]) -> int:
    """Run what the command line says; returns the exit code.

    Raises:
        ValueError: for what cannot be done, and without the packages of the extra.
        FileNotFoundError: without the checkpoint.
    """
    try:
        return _run(given)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{error}; it comes with the extra: pip install 'zero-fn[serve]'"
        ) from error


def _run(given: dict[str, Any]) -> int:
    import torch

    from .. import tree
    from ..models.gpt_decoding import decoder
    from .model_files import load_model
    from .quantization import quantize

    params, config = load_model(given["checkpoint"])
    params = tree.map(lambda x: x.to(getattr(torch, given["dtype"])), params)
    if config.tied:
        params["head"] = params["tokens"]
    if given["quantize"]:
        params = quantize(params, given["quantize"])
    model = decoder(config)
    return (_generate if given["command"] == "generate" else _serve)(given, model, params)


def _generate(given: dict[str, Any], model: Any, params: Any) -> int:
    import codecs

    from .. import random
    from .generation import stream

    text = given["prompt"] is not None
    if text and model.vocabulary != 256:
        raise ValueError(
            f"--prompt: the model has a vocabulary of {model.vocabulary} tokens, not of bytes; "
            "give token ids: --tokens 1,2,3"
        )
    prompt = list(given["prompt"].encode()) if text else _token_ids(given["tokens"])
    steps = stream(
        model,
        params,
        [prompt],
        max_new_tokens=given["max_new_tokens"],
        temperature=given["temperature"],
        top_k=given["top_k"],
        top_p=given["top_p"],
        key=random.key(given["seed"]),
    )
    letters = codecs.getincrementaldecoder("utf-8")("replace")
    for number, (token,) in enumerate(steps):
        assert token is not None
        new = letters.decode(bytes([token])) if text else ("," if number else "") + str(token)
        print(new, end="", flush=True)
    print()
    return 0


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--tokens {text}: token ids are numbers with commas between") from None


def _serve(given: dict[str, Any], model: Any, params: Any) -> int:
    import uvicorn

    from .continuous import ContinuousBatcher
    from .serving import Limits, app

    if not 0 <= given["port"] < 2**16:
        raise ValueError(f"--port {given['port']}: a port is 1 to 65535, or 0 for any that is free")
    limits = Limits(given["max_body"], given["max_new_tokens"], given["timeout"])
    with ContinuousBatcher(
        model, params, slots=given["slots"], max_queue=given["max_queue"]
    ) as batcher:
        server = app(batcher, limits)
        print(f"zero-fn serve on http://{given['host']}:{given['port']}", file=sys.stderr)
        uvicorn.run(server, host=given["host"], port=given["port"], log_level="warning")
        batcher.close(drain=False)
    return 0
