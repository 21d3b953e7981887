"""Pictures of runs: what is drawn is what the rows say, and each sentence is computed from them."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from spanformer.report import compare_pictures as compare
from spanformer.report import drawing
from spanformer.report.cost_pictures import cost_picture
from spanformer.report.dynamic_pictures import dynamic_picture
from spanformer.report.equal import at_equal
from spanformer.report.events import read_run
from spanformer.report.measures import attention_per_token, looks_back, predicted
from spanformer.report.run_pictures import loss_picture, run_pictures
from spanformer.report.span_pictures import heads_picture, history_picture, trend_picture
from support import synthetic_runs as synthetic

SMALL = {"layers": 2, "heads": 3, "steps": 12}


@pytest.fixture
def run(tmp_path):
    return read_run(synthetic.write(tmp_path / "one", synthetic.events(**SMALL, dynamic=True)))


def made(tmp_path, name, **options):
    return read_run(synthetic.write(tmp_path / name, synthetic.events(name=name, **(SMALL | options))))


def words(figure):
    """Every text of a figure."""
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def test_every_picture_is_saved_and_has_its_sentence(run, tmp_path):
    pictures = run_pictures(run)
    assert [each.name for each in pictures] == [
        "loss", "spans-by-layer", "spans-history", "spans-trend", "cost", "dynamic-spans",
    ]  # fmt: skip
    for each in pictures:
        path = each.save(tmp_path / f"{each.name}.png")
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
        assert each.sentence.endswith(".") and each.title
        assert any("enwik8 tiny" in text for text in words(each.figure)), each.name


def test_loss_is_drawn_in_bits_over_steps_and_time(run):
    by_step, by_time = loss_picture(run).figure.axes
    raw, smoothed, valid, _test = by_step.lines
    np.testing.assert_allclose(raw.get_ydata(), [row.loss / math.log(2) for row in run.steps])
    assert list(raw.get_xdata()) == list(smoothed.get_xdata()) == [row.step for row in run.steps]
    np.testing.assert_allclose(valid.get_ydata(), [row.bits for row in run.evals if row.split == "valid"])
    np.testing.assert_allclose(by_time.lines[0].get_xdata(), [row.seconds for row in run.steps])


def test_loss_sentence_says_when_it_was_best(run):
    valid = [row for row in run.evals if row.split == "valid"]
    assert f"from {valid[0].bits:.3f} to {valid[-1].bits:.3f} bits per byte" in loss_picture(run).sentence
    worse = dataclasses.replace(valid[-1], step=9999, bits=7.0)
    sentence = loss_picture(dataclasses.replace(run, evals=[*valid, worse])).sentence
    assert f"best, {valid[-1].bits:.3f}, at step {valid[-1].step:,}" in sentence and "above training" in sentence
    assert "never validated" in loss_picture(dataclasses.replace(run, evals=[])).sentence


def test_losses_that_are_no_numbers_are_left_out(run):
    lost = [dataclasses.replace(row, loss=math.nan) for row in run.steps[6:]]
    picture = loss_picture(dataclasses.replace(run, steps=run.steps[:6] + lost))
    assert len(picture.figure.axes[0].lines[0].get_ydata()) == 6
    assert loss_picture(dataclasses.replace(run, steps=lost, evals=[])) is None


def test_every_head_has_its_dot(run):
    picture = heads_picture(run)
    dots = np.concatenate([dots.get_offsets() for dots in picture.figure.axes[0].collections[1:]])
    np.testing.assert_allclose(np.sort(dots[:, 1]), np.sort(looks_back(run.steps[-1]).ravel()))
    assert set(dots[:, 0].round().astype(int)) == {1, 2}
    longest = np.unravel_index(run.steps[-1].spans.argmax(), (2, 3))
    assert f"head {longest[1] + 1} of layer {longest[0] + 1}" in picture.sentence


def test_caption_names_heads_without_learned_spans(tmp_path):
    run = made(tmp_path, "window", kind="full", max_span=64)
    assert heads_picture(run).sentence == "No head learns a span: each looks back 64 tokens."
    assert history_picture(run) is None and trend_picture(run) is None
    run = made(tmp_path, "both sides", kind="full", max_span=64, objective="encoder")
    assert heads_picture(run).sentence == "No head learns a span: each looks 64 tokens to either side."


def test_history_has_a_row_for_each_head_and_a_column_for_each_step(run):
    picture = history_picture(run)
    values = picture.figure.axes[0].collections[0].get_array()
    np.testing.assert_allclose(values, np.stack([row.spans.ravel() for row in run.steps], axis=1))
    assert "of 6 heads" in picture.sentence and "the largest change is head" in picture.sentence


def test_trend_ends_at_the_last_spans(run):
    longest, executed, average, _limit = trend_picture(run).figure.axes[0].lines
    last = run.steps[-1]
    assert longest.get_ydata()[-1] == last.spans.max() and executed.get_ydata()[-1] == last.reach.mean()
    assert average.get_ydata()[-1] == pytest.approx(last.spans.mean())


def test_cost_bars_are_the_predicted_parts_and_the_measured_pairs(run):
    picture = cost_picture(run)
    learned, whole = predicted(run)
    predicted_axis, *_ = (axis for axis in picture.figure.axes if "Predicted" in axis.get_title(loc="left"))
    widths = [bar.get_width() for bar in predicted_axis.patches]
    assert widths == [*whole.parts().values(), *learned.parts().values()]
    assert [tick.get_text() for tick in predicted_axis.get_yticklabels()] == ["learned spans", "full attention"]
    texts = words(picture.figure)
    for expected in ("FLOPs counted in a step\n3.11× less", "Time in attention\n9× less", "Peak memory\n2.55× less"):
        assert expected in texts
    assert "time in attention 9× less" in picture.sentence


def test_cost_shows_where_the_time_of_a_step_goes(run):
    picture = cost_picture(run)
    axis, *_ = (axis for axis in picture.figure.axes if "time of a step" in axis.get_title(loc="left"))
    learned, whole = [0.08, 0.16, 0.12, 0.04], [0.72, 0.16, 0.12, 0.04]  # attention, products, optimiser, the rest
    np.testing.assert_allclose([bar.get_width() for bar in axis.patches], [*whole, *learned])
    said = "2.6× less, of which attention 20 %, other products 40 %, optimiser 30 %, the rest 10 %"
    assert axis.get_title(loc="left") == f"Measured: time of a step {said}"
    assert {"400 ms", "1.04 s", "other products", "optimiser", "the rest"} <= set(words(picture.figure))
    assert "time of a step 2.6× less" in picture.sentence


def test_cost_without_measurements_is_predicted_alone(run):
    picture = cost_picture(dataclasses.replace(run, costs=[]))
    assert len(picture.figure.axes) == 1 and "nothing was measured" in picture.sentence
    more = {"learned": 3.0, "full": 1.0}
    some = dataclasses.replace(run.costs[0], flops={}, peak_bytes={}, step_seconds={}, attention_seconds=more)
    picture = cost_picture(dataclasses.replace(run, costs=[some]))
    assert len(picture.figure.axes) == 2 and "time in attention 3× more" in picture.sentence


def test_cost_without_prediction_shows_measurements_only(tmp_path):
    run = made(tmp_path, "masked", objective="encoder")
    picture = cost_picture(run)
    assert len(picture.figure.axes) == 4 and "What the learned spans cost" in words(picture.figure)[-2]
    assert picture.sentence.startswith("Beside full attention, measured: counted operations 3.11× less, time in")
    assert cost_picture(dataclasses.replace(run, costs=[])) is None
    fixed = cost_picture(made(tmp_path, "fixed", objective="encoder", kind="full"))
    assert "its own" in words(fixed.figure) and "learned" not in words(fixed.figure)
    alike = dataclasses.replace(run.costs[0], flops={"learned": 1000.0, "full": 1000.1})
    assert "counted operations the same, time" in cost_picture(dataclasses.replace(run, costs=[alike])).sentence


def test_dynamic_spans_are_drawn_above_their_characters(run):
    picture = dynamic_picture(run)
    axis = picture.figure.axes[0]
    shown = "".join(label.get_text() for label in axis.get_xticklabels())
    assert shown == synthetic.TEXT[:80].replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    assert picture.sentence.startswith("layer 5 head 1 varies most") and "where a word begins" in picture.sentence
    assert dynamic_picture(dataclasses.replace(run, dynamics=[])) is None


@pytest.mark.parametrize("text", ["x", "$", "漢字 $x^2$ \x00\ud7ff", " " * 500])
def test_any_text_can_be_drawn(run, text):
    odd = dataclasses.replace(run.dynamics[0], text=text, spans=np.full((1, len(text)), 3.0), names=["$\\frac{$"])
    dynamic_picture(dataclasses.replace(run, dynamics=[odd])).figure.canvas.draw()


def test_runs_are_drawn_side_by_side(tmp_path):
    named = {name: made(tmp_path, name, floor=floor) for name, floor in (("good", 1.5), ("bad", 2.5))}
    picture = compare.bits_picture(named)
    assert picture.sentence.startswith("good ends lowest") and "bad ends highest" in picture.sentence
    assert any(text.startswith("good ") for text in words(picture.figure))


def test_sweep_groups_by_limit_and_kind(tmp_path):
    runs = [
        made(tmp_path, f"{kind}{limit}-{seed}", kind=kind, max_span=limit, seed=seed, floor=1.5 + seed / 10)
        for kind in ("adaptive_span", "full")
        for limit in (128, 512)
        for seed in (0, 1)
    ]
    picture = compare.sweep_picture(runs)
    bits, spans, flops = picture.figure.axes
    assert [list(line.get_xdata()) for line in bits.lines] == [[128, 512]] * 2
    finals = [compare.quality(run).bits[-1] for run in runs[:2]]
    assert bits.lines[0].get_ydata()[0] == pytest.approx(np.mean(finals))
    assert list(spans.lines[1].get_ydata()) == [128, 512]
    assert flops.lines[1].get_ydata()[0] == pytest.approx(attention_per_token(runs[4]))
    assert "full: from a limit of 128 to 512 bits per byte at the end go from" in picture.sentence
    assert compare.sweep_picture(runs[:2]) is None


def test_sweep_compares_bits_at_equal_tokens(tmp_path):
    """Full attention stopped after a number of minutes, before its last steps."""
    runs = [made(tmp_path, f"{kind}-{limit}", kind=kind, max_span=limit, steps=40 - 10 * (kind == "full"))
            for kind in ("adaptive_span", "full") for limit in (128, 512)]  # fmt: skip
    picture = compare.sweep_picture(runs)
    bits = picture.figure.axes[0]
    assert bits.get_title(loc="left") == "bits per byte after 614 k tokens (lower is better)"
    assert list(bits.lines[0].get_ydata()) == at_equal(runs).at_tokens[:2]
    assert bits.lines[0].get_ydata()[0] > compare.quality(runs[0]).bits[-1]
    assert "128 to 512 bits per byte after 614 k tokens go from" in picture.sentence
    assert "Spans and costs are those at the end of each run." in " ".join(words(picture.figure))


@pytest.mark.parametrize("cost, said", [(True, "tokens and a step costs 1 times as much."), (False, " tokens.")])
def test_sweep_without_prediction_shows_what_was_counted(tmp_path, cost, said):
    runs = [made(tmp_path, f"at {limit}", max_span=limit, objective="encoder", cost=cost) for limit in (128, 512)]
    picture = compare.sweep_picture(runs)
    assert picture.sentence.endswith(said) and len(picture.figure.axes) == 2 + cost
    picture.figure.canvas.draw()


def test_sweep_shows_spans_of_zero(tmp_path):
    runs = [made(tmp_path, f"at {limit}", max_span=limit) for limit in (128, 512)]
    for run in runs:
        run.steps[-1].spans[:] = 0.0
    figure = compare.sweep_picture(runs).figure
    figure.canvas.draw()
    spans = figure.axes[1]
    assert list(spans.lines[0].get_ydata()) == [0, 0]
    assert np.isfinite(spans.transData.transform([(128, 0.0)])).all()  # a logarithmic axis has no place for them
    assert [label.get_text() for label in spans.get_yticklabels()] == ["0", "1"]


def test_runs_that_cannot_be_compared_are_not(tmp_path, run):
    words_run = made(tmp_path, "words", unit="word")
    assert compare.compare_pictures([run, words_run], ["a", "b"]) == []
    assert compare.compare_pictures([run], ["a"]) == []


@pytest.mark.parametrize("low, high", [(1.6, 8.0), (1.601, 1.602), (2.0, 2.0), (1e-3, 5e9), (0.9, 14.0), (95, 140)])
def test_logarithmic_axes_have_a_few_numbers(low, high):
    _, ((axis,),) = drawing.subplots(1, 1, width=3, height=3)
    axis.set_yscale("log")
    drawing.log_ticks(axis.yaxis, [low, high], lambda value: f"{value:g}")
    ticks = [tick for tick in axis.get_yticks() if low / 1.1 <= tick <= high * 1.1]
    assert 1 <= len(ticks) <= 14


def test_equal_tick_labels_appear_once():
    _, ((axis,),) = drawing.subplots(1, 1, width=3, height=3)
    axis.set_yscale("log")
    drawing.log_ticks(axis.yaxis, [218.7, 219.2], lambda value: f"{value:.0f} MB")
    shown = [label.get_text() for label in axis.get_yticklabels()]
    assert shown == ["219 MB"] and 218.7 <= axis.get_yticks()[0] <= 219.2


@pytest.mark.parametrize(
    "top, ticks", [(1, [0, 1]), (2, [0, 1, 2]), (100, [0, 1, 4, 16, 100]), (256, [0, 1, 4, 16, 64, 256])]
)
def test_spans_have_round_ticks_and_the_limit(top, ticks):
    assert drawing.span_ticks(top) == ticks


def test_missing_matplotlib_is_one_sentence(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ImportError, match=r"pictures need matplotlib; install it with: pip install 'spanformer\[plot\]'"
    ):
        run_pictures(run)


def test_plotting_is_imported_only_when_a_picture_is_drawn():
    code = "import sys, spanformer.report.page, spanformer.report.spans_text; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
