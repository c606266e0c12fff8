"""A timeline as text, in colours, on Axes and as a table: the right actions at the right places."""

import io
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest

matplotlib.use("agg")

from matplotlib import pyplot
from rich.console import Console

from zero_fn.pipelining.builders import SCHEDULES, pipeline_schedule
from zero_fn.pipelining.schedule import parse_schedule
from zero_fn.pipelining.timeline import timeline


@pytest.fixture(autouse=True)
def _no_figure_is_left():
    yield
    pyplot.close("all")


def test_text_writes_actions_out_where_they_fit():
    assert str(timeline(pipeline_schedule("1f1b", 2, 2))).split("\n") == [
        "1f1b, 2 ranks × 2 micro-batches: bubble 33.3 %, makespan 9",
        "rank 0  F0 F1 ·  ·  B0─── ·  B1───",
        "rank 1  ·  F0 B0─── F1 B1─── ·  ·",
        "peak activations 2 1",
    ]


def test_text_names_the_stage_where_a_rank_has_several():
    assert timeline(pipeline_schedule("zbv", 1, 1)).text().split("\n")[1:] == [
        "rank 0  0F0 1F0 1I0 1W0 0I0 0W0",
        "peak activations 2",
    ]


def test_text_slices_time_where_actions_do_not_fit():
    # 2 ranks of 9 units on 18 columns: each unit is two characters
    lines = timeline(pipeline_schedule("1f1b", 2, 2)).text(width=8 + 18).split("\n")
    assert lines[1:3] == ["rank 0  FFFF····BBBB··BBBB", "rank 1  ··FFBBBBFFBBBB····"]
    # 9 units on 5 columns: whatever runs in the middle of each, at 0.9, 2.7, 4.5, 6.3 and 8.1
    assert timeline(pipeline_schedule("1f1b", 2, 2)).text(8 + 5).split("\n")[1] == "rank 0  F·B·B"
    # a later stage of a rank is written small
    lines = timeline(pipeline_schedule("zbv", 1, 1)).text(width=8 + 6).split("\n")
    assert lines[1] == "rank 0  FfiwIW"


def test_text_slices_time_where_costs_are_no_multiples_of_each_other():
    line = timeline(parse_schedule("0F0,0B0"), forward=1, input_grad=1, weight_grad=0.5)
    assert line.text(width=8 + 10).split("\n")[1] == "rank 0  FFFFBBBBBB"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [1, 20, 80, 400])
def test_text_keeps_to_its_width(name, width):
    text = timeline(pipeline_schedule(name, 3, 5)).text(width)
    rows = [line for line in text.split("\n") if line.startswith("rank ")]
    assert len(rows) == 3
    # a row has its name and one character at least
    assert max(map(len, rows)) <= max(width, len("rank 0  ") + 1)


def test_text_of_costs_of_zero():
    line = timeline(pipeline_schedule("gpipe", 1, 1), forward=0, input_grad=0, weight_grad=0)
    assert line.text(width=12).split("\n")[1] == "rank 0  ····"
    line.draw().figure.savefig(io.BytesIO())
    assert "<rect" in line._repr_html_()


def test_rich_prints_the_same_text_in_colours():
    line = timeline(pipeline_schedule("zero_bubble", 3, 3))
    plain, coloured = io.StringIO(), io.StringIO()
    Console(file=plain, width=70).print(line)
    Console(file=coloured, width=70, force_terminal=True, color_system="truecolor").print(line)
    assert plain.getvalue().rstrip("\n") == line.text(70)
    assert coloured.getvalue().count("48;2;119;170;221") == 3 * 3, "each F on its own colour"
    first_line, *_, last_line = coloured.getvalue().rstrip("\n").split("\n")
    assert "48;2" not in first_line + last_line


def test_drawing_puts_each_action_at_its_place_and_shows_nothing(monkeypatch):
    monkeypatch.setattr(pyplot, "show", lambda *a, **k: pytest.fail("shown"))
    line = timeline(pipeline_schedule("zbv", 3, 4))
    _, ax = pyplot.subplots()
    assert line.draw(ax) is ax
    bars = {(b.get_x(), round(b.get_y() + b.get_height() / 2), b.get_width()) for b in ax.patches}
    expected = {
        (e.start, rank, e.end - e.start) for rank, row in enumerate(line.events) for e in row
    }
    idle = {(0, rank, line.makespan) for rank in range(3)}
    assert bars == expected | idle
    assert "bubble" in ax.get_title(loc="left")
    labels = {text.get_text() for text in ax.get_legend().get_texts()}
    assert {"F forward", "I input gradient", "W weight gradient", "idle"} <= labels
    assert "B backward" not in labels


def test_drawing_numbers_the_microbatches_where_there_is_room():
    few = timeline(pipeline_schedule("1f1b", 2, 3)).draw()
    assert sorted(t.get_text() for t in few.texts) == sorted("012" * 4)
    many = timeline(pipeline_schedule("1f1b", 2, 300)).draw()
    assert not many.texts


@pytest.mark.parametrize("form", ["svg", "png"])
def test_a_drawing_saves_as(form):
    file = io.BytesIO()
    timeline(pipeline_schedule("dualpipev", 2, 4)).draw().figure.savefig(file, format=form)
    assert file.getvalue().startswith(b"<?xml" if form == "svg" else b"\x89PNG")


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_notebook_shows_a_table(name):
    line = timeline(pipeline_schedule(name, 3, 4))
    table = ElementTree.fromstring(line._repr_html_().replace("<br>", "<br/>"))
    rows = table.findall("tr")[1:]
    assert [row.find("td").text for row in rows] == ["0", "1", "2"]
    for row, events in zip(rows, line.events, strict=True):
        bars = row.findall(".//rect")
        titles = [bar.find("title").text.split(":")[0] for bar in bars]
        assert titles == [str(event.action) for event in events]
        ends = [float(bar.get("x")) + float(bar.get("width")) for bar in bars]
        # two places of a thousandth of the width
        assert max(ends) == pytest.approx(1000 * events[-1].end / line.makespan, abs=0.02)
