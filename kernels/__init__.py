"""Kernels, imported as ``zero_fn.kernels``: a reference, a fast path and one registration for each.

Nothing here imports the rest of ``zero_fn``. Names load when first used, so that importing the
package needs neither Triton nor a driver.
"""

import importlib
from typing import Any

_HOME: dict[str, str] = {
    "Layout": "layouts",
    "block_sparse_attention": "sparse_attention",
    "dense_attention": "flash_attention",
    "fused_adamw": "adam",
    "fused_adamw_": "adam",
    "int8_linear": "int8_products",
    "pack_average": "momentum",
    "pack_momentum": "momentum",
    "philox": "random_words",
    "precondition": "momentum",
    "rest_of_average": "momentum",
    "rest_of_momentum": "momentum",
    "sign_pack": "sign_packing",
    "sign_unpack": "sign_packing",
    "unpack_if": "momentum",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
