"""What ``zero-fn run`` starts on each rank in place of a script: the script, and who failed first.

    python -m zero_fn.launching.script train.py ARGUMENTS
    python -m zero_fn.launching.script -m package.module ARGUMENTS

A traceback goes to torchrun, which shows that of the first rank, and is not printed by each.
"""

import os
import runpy
import sys
import time

from .starting import ECHOES

PATIENCE = 2.0  # seconds; torchrun knows the time of a failure in whole ones


def main(arguments: list[str]) -> int:
    """Run a script, or with ``-m`` a module; returns the exit code."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path[0] = os.getcwd()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    except Exception as error:
        if any(echo in str(error) for echo in ECHOES):
            time.sleep(PATIENCE)  # another rank has failed, and this one noticed: let it be heard
        handler.record_exception(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
