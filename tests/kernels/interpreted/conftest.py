"""Tests that run Triton kernels in Triton's interpreter, on CPU tensors.

Triton decides at the decoration of a kernel whether it is interpreted, so that these files are
collected only where TRITON_INTERPRET is set: ``tests/kernels/test_interpreted.py`` runs them so.
"""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
