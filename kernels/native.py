"""C for a CPU, compiled when it is first used and kept in the user's cache.

For what neither torch nor numpy can do in one pass over memory. Where there is no compiler, or no
place to keep what it makes, ``library`` is None, and the caller has another way.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_log = logging.getLogger("zero_fn.kernels")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
TIME_LIMIT = 60  # seconds for a compiler


@functools.cache
def library(source: Path) -> ctypes.CDLL | None:
    """The compiled source, from the cache if it is there; None where that cannot be."""
    compiler = next(
        filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), ""
    )
    if not compiler or sys.byteorder != "little":
        return None
    try:
        path = _cache() / f"{source.stem}-{_key(source, compiler)}.so"
        if not path.exists():
            _compile(compiler, source, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as problem:
        said = getattr(problem, "stderr", None) or problem
        _log.info("%s is not compiled, and another way is taken: %s", source.name, said)
        return None


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(root) / "zero_fn"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def _key(source: Path, compiler: str) -> str:
    """Changes with whatever the machine code depends on; a cache may be shared by machines."""
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, timeout=TIME_LIMIT
    ).stdout
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    headers = sorted(source.parent.glob("*.h"))
    code = b"".join(file.read_bytes() for file in (source, *headers))
    parts = (code, version, platform.machine().encode(), features.encode())
    return hashlib.sha256(b"\0".join((*parts, *map(str.encode, FLAGS)))).hexdigest()[:16]


def _compile(compiler: str, source: Path, path: Path) -> None:
    """Beside its place and then moved there, since other ranks may do the same just now."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        subprocess.run(
            [compiler, *FLAGS, str(source), "-o", str(made)],
            check=True,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
        )
        os.replace(made, path)
