"""``zero-fn plan``: what it prints, and what it says of mistakes."""

import json

import pytest

from zero_fn.__main__ import main


def test_a_plan_is_printed_and_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "demo", "--stage", "2", "--dp", "16", "--hardware", "v100-32gb"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "demo: 3,257,856 parameters, 128 tokens" in out
    assert "dp 16, stage 2, fp16, batch 1" in out
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["parameters"] == 3_257_856
    assert found["peak"]["bytes"] == sum(
        size for part, size in found["peak"].items() if part not in ("bytes", "at")
    )


def test_what_fits_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "demo", "--fit", "--ranks", "2", "--sequences", "2"]) == 0
    assert "2 × a100-80gb, 2 sequences a step" in capsys.readouterr().out


def test_mistakes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--model", "gpt3"], "no model 'gpt3'"),
        (["--hardware", "h10"], "did you mean 'h100'"),
        (["--fit"], "give it: --ranks 16"),
        (["--fit", "--ranks", "4", "--stage", "2"], "--fit looks for --stage by itself"),
        (["--ranks", "4"], "--ranks goes with --fit"),
        (["--tp", "2"], "tp=2 does not divide the model's 25 heads"),
        (["--dp", "0"], "dp is 0; it is 1 or more"),
    ):
        assert main(["plan", *arguments]) == 2
        assert words in capsys.readouterr().err
