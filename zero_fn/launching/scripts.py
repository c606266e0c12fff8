"""``zero-fn run``: torchrun with few options, which shows the error of the first failed rank."""

import argparse
import contextlib
import fcntl
import logging
import os
import socket
import struct
import sys
from typing import Any

PORT = 29500
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def add_command(commands: Any) -> None:
    """Add it to a parser's commands."""
    run = commands.add_parser(
        "run",
        help="run a script on several processes and hosts, by torchrun",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    run.add_argument("--nproc", type=int, default=1, help="processes on this host")
    run.add_argument("--nnodes", type=int, default=1, help="hosts; each runs this command")
    run.add_argument(
        "--host", metavar="ADDRESS[:PORT]", help=f"of the first host, for several; port {PORT}"
    )
    run.add_argument(
        "--max-restarts", type=int, default=0, help="how often all start again when one fails"
    )
    run.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    run.add_argument("script", help="the script, or the module")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")


def run(given: dict[str, Any]) -> int:
    """Run what the command line says; returns the exit code.

    Raises:
        ValueError: for options that do not go together.
        FileNotFoundError: without the script.
    """
    if not given["module"] and not os.path.isfile(given["script"]):
        raise FileNotFoundError(f"{given['script']}: no such script; -m is for modules")
    for name, least in (("nproc", 1), ("nnodes", 1), ("max_restarts", 0)):
        if given[name] < least:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is {given[name]}; it must be {least} or more")
    command = [*_options(given), "-m", "zero_fn.launching.script"]
    command += ["-m"] * given["module"] + [given["script"], *given["arguments"]]

    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun does, and warns
    # torch 2.13 keeps one store over restarts, with the addresses of processes that are gone in it.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    try:
        torchrun.run(torchrun.parse_args(command))
    except ChildFailedError as error:
        print(f"zero-fn run: {_described(*error.get_first_failure())}", file=sys.stderr)
        return 1
    return 0


def _options(given: dict[str, Any]) -> list[str]:
    several = given["nnodes"] > 1
    if several and given["host"] is None:
        raise ValueError(
            f"--nnodes {given['nnodes']}: on which host do they meet? Give every host the same "
            f"--host ADDRESS[:PORT], of the first"
        )
    host, _, port = (given["host"] or "127.0.0.1:0").partition(":")
    port = port or str(PORT)
    options = {
        "nproc-per-node": given["nproc"],
        "nnodes": given["nnodes"],
        "max-restarts": given["max_restarts"],
        "rdzv-backend": "c10d",
        "rdzv-id": "zero-fn",
        "rdzv-endpoint": f"{host}:{port}",
    }
    if several:
        here = _address_towards(host)
        # torchrun asks for the host's name instead, which says little where there are more networks
        options["rdzv-conf"] = f"is_host={int(here == socket.gethostbyname(host))}"
        options["local-addr"] = here
        interface = _interface_of(here)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return [f"--{name}={value}" for name, value in options.items()]


def _address_towards(host: str) -> str:
    """This host's address in the network of another."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.connect((host, PORT))  # sends nothing
            return str(udp.getsockname()[0])
    except OSError as error:
        raise ValueError(f"--host {host} cannot be reached from here: {error}") from error


def _interface_of(address: str) -> str | None:
    """The network interface with that address; None where the system does not tell."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                asked = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(udp, _SIOCGIFADDR, asked)[20:24]) == address:
                    return name
    return None


def _described(rank: int, failure: Any) -> str:
    """Which rank failed, and how."""
    name = f"rank {rank}"
    if failure.exitcode < 0:
        return f"{name}: its process was ended by {failure.signal_name()}"
    message = failure.message
    if isinstance(message, dict):
        message = message.get("extraInfo", {}).get("py_callstack", message)
    if failure.error_file == "<N/A>":
        return f"{name}: it ended with exit code {failure.exitcode}"
    return f"{name} raised\n\n{message}".rstrip()
