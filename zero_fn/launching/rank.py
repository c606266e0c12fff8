"""What a process that ``zf.launch`` started runs: ``python -m zero_fn.launching.rank FD``.

Standard input holds the function; its end means that nobody waits for this rank any more.
"""

import os
import pickle
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch


def main(descriptor: int) -> int:
    """Run the function that comes over standard input, and answer over the pipe."""
    answers = Connection(descriptor, readable=False)
    source = sys.stdin.buffer
    data = source.read(int.from_bytes(source.read(8), "little"))
    threading.Thread(target=_end_with, args=(source.fileno(),), daemon=True).start()
    sys.stdin = open(os.devnull)  # noqa: SIM115
    try:
        f, sizes, timeout, args = pickle.loads(data)
        from ..mesh import Mesh
        from ..tree import Tensor, map

        mesh = Mesh(backend="processes", timeout=timeout, **sizes)
        result = f(mesh, *args)
        answer = map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, result)
        answers.send_bytes(_dumps((True, answer)))
    except BaseException as error:
        _report(answers, error)
        return 1
    return 0


def _report(answers: Connection, error: BaseException) -> None:
    when, frames = time.monotonic(), error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, frames and frames.tb_next))
    try:
        sent = _dumps((False, (text, error, when)))
        pickle.loads(sent)  # some exceptions can be sent and not be read
    except Exception:
        named = RuntimeError(f"{type(error).__name__}: {error}")
        sent = _dumps((False, (text, named, when)))
    answers.send_bytes(sent)


def _dumps(value: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value)
    return cloudpickle.dumps(value)


def _end_with(descriptor: int) -> None:
    """End this process when standard input does: whoever started it is gone."""
    while os.read(descriptor, 1 << 16):
        pass
    time.sleep(1.0)  # one that ends by itself closes its files first
    os._exit(1)


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.exit(main(int(sys.argv[1])))
