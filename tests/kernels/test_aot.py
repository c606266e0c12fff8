"""Kernels compiled for sm_80, sm_90 and sm_100: no spills, wide accesses, the recorded figures."""

import pytest
import triton

from tests.kernels import aot

pytestmark = pytest.mark.skipif(
    not aot.CUOBJDUMP.exists(), reason="this Triton comes without NVIDIA's tools"
)


@pytest.mark.parametrize("variant", aot.variants(), ids=lambda variant: variant.name)
def test_compiles_to_what_is_recorded(variant: aot.Variant) -> None:
    rows = aot.recorded()
    for capability in aot.CAPABILITIES:
        found = aot.compile_variant(variant, capability)
        assert found.stack == 0, f"sm_{capability} spills {found.stack} bytes a thread"
        assert found.loads_16, f"sm_{capability} has no 16-byte loads"
        assert found.stores_16, f"sm_{capability} has no 16-byte stores"
        assert bool(found.tensor_core) == variant.tensor_cores
        if triton.__version__ == rows["triton"]:
            # Another compiler counts differently; `python -m tests.kernels.aot` writes it anew.
            assert found._asdict() == rows["variants"][variant.name][f"sm_{capability}"]


def test_the_table_has_the_shipped_variants_and_no_others() -> None:
    assert set(aot.recorded()["variants"]) == {variant.name for variant in aot.variants()}
