"""Kernels compiled for sm_80, sm_90 and sm_100: no spills, wide accesses, the recorded figures."""

from typing import Any

import pytest
import triton

from tests.kernels import aot

pytestmark = pytest.mark.skipif(
    not aot.CUOBJDUMP.exists(), reason="this Triton comes without NVIDIA's tools"
)


# Attention takes seconds a kernel and GPU: these three always, the others with `pytest -m slow`.
QUICK = {f"attention {which}: bf16, head size 64" for which in ("forward", "dq", "dkv")}


def _marked(name: str) -> Any:
    slow = name.startswith("attention") and name not in QUICK
    return pytest.param(name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("name", [_marked(name) for name in aot.names()])
def test_compiles_to_what_is_recorded(name: str) -> None:
    rows = aot.recorded()
    for capability in aot.CAPABILITIES:
        (variant,) = (v for v in aot.variants(capability) if v.name == name)
        found = aot.compile_variant(variant, capability)
        assert found.stack == 0, f"sm_{capability} spills {found.stack} bytes a thread"
        assert found.loads_16 or not variant.wide_loads, f"sm_{capability} has no 16-byte loads"
        assert found.stores_16, f"sm_{capability} has no 16-byte stores"
        assert bool(found.tensor_core) == variant.tensor_cores
        if triton.__version__ == rows["triton"]:
            # Another compiler counts differently; `python -m tests.kernels.aot` writes it anew.
            assert found._asdict() == rows["variants"][name][f"sm_{capability}"]


def test_the_table_has_the_shipped_variants_and_no_others() -> None:
    assert set(aot.recorded()["variants"]) == set(aot.names())


def test_what_is_recorded_fits() -> None:
    for name, row in aot.recorded()["variants"].items():
        for gpu, figures in row.items():
            assert figures["stack"] == 0, (name, gpu)
        # what sm_86, sm_89 and sm_120 have, which run the tiles of sm_80
        assert row["sm_80"]["shared"] <= 99 * 1024, name
