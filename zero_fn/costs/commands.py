"""``zero-fn plan``."""

import argparse
import dataclasses
import json
from typing import Any

from .presets import MODELS


def add_command(commands: Any) -> None:
    """Add it to a parser's commands."""
    parser = commands.add_parser(
        "plan",
        help="what a step will cost: memory, bytes sent, an estimate of the seconds",
        description="Nothing runs and nothing is allocated: programs are traced on sizes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="gpt2-1.5b", help=", ".join(MODELS))
    parser.add_argument(
        "--hardware", default="a100-80gb", help="v100-32gb, a100-80gb, h100 or h200"
    )
    parser.add_argument("--stage", type=int, choices=range(4), default=0, help="ZeRO's stage")
    for name, what in (
        ("dp", "data-parallel ranks"),
        ("tp", "ranks that divide each layer"),
        ("pp", "stages of a pipeline"),
        ("batch", "sequences of a micro-batch on one rank"),
        ("microbatches", "micro-batches of a step"),
    ):
        parser.add_argument(f"--{name}", type=int, default=1, help=what)
    parser.add_argument("--length", type=int, help="tokens of a sequence; the model's if unset")
    parser.add_argument("--remat", action="store_true", help="compute blocks again in the backward")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="bf16 if unset, fp16 on a V100"
    )
    parser.add_argument(
        "--no-loss-scale",
        action="store_true",
        help="with fp16: no dynamic loss scale, for which the update waits",
    )
    parser.add_argument(
        "--offload", choices=("host", "disk"), help="where parameters, gradients and moments live"
    )
    parser.add_argument(
        "--whole", action="store_true", help="trace the whole program, not small ones like it"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument(
        "--fit", action="store_true", help="look for the fastest set-ups that fit --ranks devices"
    )
    parser.add_argument("--ranks", type=int, help="devices, with --fit")
    parser.add_argument(
        "--sequences", type=int, help="of a step on all ranks, with --fit; 8 a rank if unset"
    )
    parser.add_argument(
        "--claims",
        nargs="?",
        const="",
        metavar="NAME",
        help="hold DeepSpeed's published claims against plans, all or those of a name",
    )


def run(given: dict[str, Any]) -> int:
    """Run what the command line says; returns the exit code.

    Raises:
        ValueError: for what cannot be.
    """
    from ..hardware import hardware
    from .presets import model

    if given["claims"] is not None:
        from .claims import report

        return report(given["claims"])
    config, known = model(given["model"]).config, hardware(given["hardware"])
    if given["length"]:
        config = dataclasses.replace(config, length=given["length"])
    dtype = given["dtype"] or ("bf16" if "bfloat16" in known.flops else "fp16")
    return (_fit if given["fit"] else _plan)(given, config, known, dtype)


def _plan(given: dict[str, Any], config: Any, known: Any, dtype: str) -> int:
    from rich.console import Console

    from .setups import Setup, plan_setup

    for name in ("ranks", "sequences"):
        if given[name] is not None:
            raise ValueError(f"--{name} goes with --fit; a plan takes --dp, --tp and --pp")
    parts = ("parameters", "gradients", "optimizer state")
    setup = Setup(
        config,
        **{name: given[name] for name in ("stage", "dp", "tp", "pp", "batch", "microbatches")},
        remat=given["remat"],
        dtype=dtype,
        loss_scale=not given["no_loss_scale"],
        offload=tuple((part, given["offload"]) for part in parts) if given["offload"] else (),
    )
    found = plan_setup(setup, known, whole=given["whole"])
    if given["json"]:
        print(json.dumps(as_json(found) | {"parameters": config.parameters}, indent=2))
        return 0
    console = Console(soft_wrap=True)
    console.print(f"{given['model']}: {config.parameters:,} parameters, {config.length} tokens")
    console.print(found.table())
    return 0


def _fit(given: dict[str, Any], config: Any, known: Any, dtype: str) -> int:
    from rich.console import Console

    from .search import search

    if given["ranks"] is None:
        raise ValueError("--fit looks for what fits a number of devices; give it: --ranks 16")
    for name, unset in (
        *((name, 1) for name in ("dp", "tp", "pp", "batch", "microbatches")),
        ("stage", 0),
        ("remat", False),
    ):
        if given[name] != unset:
            raise ValueError(f"--fit looks for --{name} by itself; leave it out")
    sequences = given["sequences"] or 8 * given["ranks"]
    offload = given["offload"] == "host"
    found = search(
        config,
        known,
        given["ranks"],
        sequences,
        dtype=dtype,
        offload=offload,
        loss_scale=not given["no_loss_scale"],
    )
    if given["json"]:
        ranking = [as_json(plan) for _, plan in found.ranking]
        reasons = [
            {"setup": str(setup), "reason": reason}
            for setup, reason in (*found.by_trace, *found.by_formula)
        ]
        print(json.dumps({"ranking": ranking, "excluded": reasons, "left": found.left}, indent=2))
    else:
        Console(width=120).print(found.table())
    return 0 if found.ranking else 1


def as_json(plan: Any) -> dict[str, Any]:
    """The numbers of a plan: bytes, operations, seconds."""
    estimate = plan.estimate
    return {
        "label": plan.label,
        "mesh": dict(plan.mesh),
        "hardware": plan.hardware.name,
        "fits": plan.fits,
        "at_rest": dict(plan.rest),
        "peak": {"bytes": plan.peak.bytes, "at": plan.peak.operation, **plan.peak.parts},
        "host": plan.host,
        "disk": plan.disk,
        "collectives": [collective._asdict() for collective in plan.collectives],
        "flops": plan.flops,
        "bubble": plan.bubble,
        "seconds": {
            "overlapped": estimate.overlapped,
            "serial": estimate.serial,
            "compute": estimate.compute,
            "communication": dict(estimate.communication),
            "idle": estimate.idle,
            "offload": estimate.offload,
        },
    }
