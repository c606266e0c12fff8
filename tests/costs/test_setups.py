"""Set-ups: plans from small traces against whole ones, formulas below plans, what a search says."""

import dataclasses
from typing import Any

import pytest

from zero_fn.costs.formulas import least_memory, least_seconds
from zero_fn.costs.presets import MODELS, model
from zero_fn.costs.search import candidates_of, search
from zero_fn.costs.setups import Setup, plan_setup
from zero_fn.hardware import hardware
from zero_fn.models import gpt

# Every matrix is above what collectives are bucketed by, in half precision too.
CONFIG = gpt.Config(5000, 64, layers=8, heads=8, width=1024)
A100 = hardware("a100-80gb")


def check_whole(**settings: Any) -> None:
    setup = Setup(CONFIG, **settings)
    small, whole = plan_setup(setup, A100), plan_setup(setup, A100, whole=True)
    # micro-batches that wait at the device are 1 KiB each, and not all of them are traced
    assert small.peak.bytes == pytest.approx(whole.peak.bytes, rel=1e-4)
    assert small.rest == pytest.approx(whole.rest)
    assert small.flops == whole.flops
    assert [c[:4] for c in small.collectives] == [c[:4] for c in whole.collectives]
    for mine, true in zip(small.collectives, whole.collectives, strict=True):
        # over pp the ring's fraction of each call is rounded down, of all of them here
        assert mine.bytes_sent == pytest.approx(true.bytes_sent, rel=1e-6)
    assert small.estimate is not None
    assert whole.estimate is not None
    assert small.estimate.compute == pytest.approx(whole.estimate.compute, rel=1e-3)
    assert small.estimate.communication == pytest.approx(whole.estimate.communication, rel=1e-6)
    assert small.bubble == (None if whole.bubble is None else pytest.approx(whole.bubble))


def test_small_traces_give_the_plan_of_the_whole() -> None:
    check_whole(stage=1, dp=4, batch=32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"stage": 0, "dp": 4, "batch": 8, "microbatches": 2},
        {"stage": 2, "dp": 4, "microbatches": 6, "remat": True},
        {"stage": 3, "dp": 4, "microbatches": 5, "batch": 2, "tp": 2},
        {"stage": 3, "dp": 4, "microbatches": 4, "remat": True, "dtype": "fp16"},
        {"stage": 1, "dp": 2, "pp": 3, "microbatches": 6, "dtype": "fp32"},
        {"stage": 1, "dp": 2, "pp": 6, "microbatches": 9},
        {"stage": 2, "dp": 2, "pp": 2, "tp": 2, "microbatches": 8, "remat": True},
        {"stage": 3, "dp": 2, "pp": 6, "tp": 2, "microbatches": 8, "remat": True, "dtype": "fp16"},
    ],
    ids=str,
)
def test_small_traces_give_any_plan(settings: dict[str, Any]) -> None:
    check_whole(**settings)


def test_a_pipeline_has_a_bubble_and_messages() -> None:
    found = plan_setup(Setup(CONFIG, pp=2, microbatches=3, dtype="fp32"), A100)
    assert found.bubble is not None
    # (P - 1) / (M + P - 1) of equal stages; the head makes the last one longer
    assert 1 / 4 < found.bubble < 1 / 2
    assert found.estimate is not None
    assert found.estimate.idle > 0
    sends = {(c.kind, c.axis): c for c in found.collectives}["send", "pp"]
    assert (sends.calls, sends.bytes_sent) == (3, 3 * 4 * 64 * 1024)


def test_formulas_are_below_plans() -> None:
    for settings in ({"stage": 1, "dp": 4}, {"stage": 0, "dp": 2, "remat": True, "dtype": "fp16"}):
        setup = Setup(dataclasses.replace(CONFIG, layers=3), batch=4, **settings)  # type: ignore[arg-type]
        found = plan_setup(setup, A100 if setup.dtype == "bf16" else hardware("v100-32gb"))
        assert found.estimate is not None
        assert found.hardware is not None
        assert least_memory(setup) <= found.peak.bytes
        assert least_seconds(setup, found.hardware) <= found.estimate.serial


def test_offloaded_parts_are_not_on_the_device() -> None:
    setup = Setup(dataclasses.replace(CONFIG, layers=2), dtype="bf16", clip=False)
    away = (("parameters", "host"), ("gradients", "host"), ("optimizer state", "disk"))
    here = plan_setup(setup, A100)
    there = plan_setup(
        dataclasses.replace(setup, offload=away), dataclasses.replace(A100, disk=1e9)
    )
    n = setup.config.parameters
    assert there.disk == pytest.approx(2 * 8 * n, rel=1e-4)
    assert there.host == pytest.approx(4 * n + here.most["gradients"], rel=1e-4)
    assert not there.rest["parameters"]
    assert there.peak.bytes < here.peak.bytes - 8 * n
    assert there.estimate is not None
    moved = 2 * 4 * n / 32e9 + 28 * n / (410e9 / 8) + 2 * 8 * n / 1e9
    assert there.estimate.offload == pytest.approx(moved, rel=1e-4)
    with pytest.raises(ValueError, match="no figure for disk"):
        plan_setup(dataclasses.replace(setup, offload=away), A100)


def test_a_search_ranks_what_fits_and_says_why_not() -> None:
    config = dataclasses.replace(CONFIG, layers=4)
    small = dataclasses.replace(A100, name="small", memory=8.5e8, node=2)
    found = search(config, small, 4, 16, wanted=2, seconds=60)
    assert [plan.fits for _, plan in found.ranking] == [True, True]
    times = [plan.estimate.overlapped for _, plan in found.ranking if plan.estimate]
    assert times == sorted(times)
    assert any("tp 4 crosses nodes of 2" in reason for _, reason in found.by_formula)
    assert any("at least" in reason for _, reason in found.by_formula)
    assert all(setup.sequences == 16 and setup.ranks == 4 for setup, _ in found.ranking)
    with pytest.raises(ValueError, match="3 sequences a step cannot be divided over 16 ranks"):
        search(dataclasses.replace(config, heads=1, layers=1), A100, 16, 3)
    every = list(candidates_of(config, 4, 16, "bf16", offload=False))
    assert len({str(setup) for setup in every}) == len(every)


def test_presets_have_the_parameters_of_their_names() -> None:
    for name, billions in (
        ("gpt2-124m", 0.124), ("gpt2-1.5b", 1.56), ("7.5b", 7.9), ("13b", 13.3),
        ("turing-nlg-17b", 17.2), ("100b", 101.1), ("1t", 1085), ("1t-wide", 1008),
    ):  # fmt: skip
        assert model(name).config.parameters / 1e9 == pytest.approx(billions, rel=0.01), name
    assert all(entry.source for entry in MODELS.values())
    with pytest.raises(ValueError, match="did you mean '13b'"):
        model("13")


def test_errors_say_what_to_write() -> None:
    with pytest.raises(ValueError, match="tp=3 does not divide the model's 8 heads"):
        Setup(CONFIG, tp=3)
    with pytest.raises(ValueError, match="pp=9 stages, and the model has 8 layers"):
        Setup(CONFIG, pp=9)
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        Setup(CONFIG, dtype="int8")
    with pytest.raises(ValueError, match="'bf16' or 'fp16' computes with copies"):
        Setup(CONFIG, dtype="fp32", offload=(("parameters", "host"),))
    with pytest.raises(ValueError, match="offload has 'activations'"):
        plan_setup(Setup(CONFIG, offload=(("activations", "host"),)), A100)
