"""The command line: ``zero-fn demo``, ``run``, ``plan``, ``generate`` and ``serve``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .costs import commands as costs
from .inference import commands as inference
from .launching import scripts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="zero-fn", description="functional ZeRO for torch.func")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="train a GPT on the sources of Python's standard library, and check it",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--dp", type=_positive, default=4, help="data-parallel ranks")
    demo.add_argument(
        "--tp", type=_positive, default=1, help="ranks that divide each layer (tensor slicing)"
    )
    demo.add_argument(
        "--pp", type=_positive, default=1, help="stages of a pipeline, each on ranks of its own"
    )
    demo.add_argument(
        "--stage", type=int, choices=range(4), help="ZeRO's stage; 3, or 0 with --compress"
    )
    demo.add_argument("--steps", type=_positive, default=150, help="steps to train")
    demo.add_argument("--preset", default="small", help="the size of the model")
    demo.add_argument(
        "--compress",
        metavar="METHOD",
        help="how gradients travel: 1bit, bf16, int8, topk, powersgd",
    )
    demo.add_argument(
        "--attention",
        metavar="NAME",
        default="dense",
        help="dense, or a sparse layout: fixed, variable, bigbird, bslongformer, "
        "local_sliding_window",
    )
    demo.add_argument("--text", type=Path, help="a file or folder to train on")
    demo.add_argument("--save", type=Path, metavar="FOLDER", help="where checkpoints are kept")
    demo.add_argument("--save-every", type=_positive, default=50, help="steps between them")
    demo.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint, if there is one"
    )
    scripts.add_command(commands)
    costs.add_command(commands)
    inference.add_commands(commands)
    given = vars(parser.parse_args(arguments))
    command = given["command"]
    try:
        if command in inference.COMMANDS:
            return inference.run(given)
        if command == "run":
            return scripts.run(given)
        del given["command"]
        if command == "plan":
            return costs.run(given)

        from .demo import Options, run  # here, so that --help is quick

        return run(Options(**given))
    except (ValueError, FileNotFoundError) as error:
        print(f"zero-fn {command}: {error}", file=sys.stderr)
        return 2


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
