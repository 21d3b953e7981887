"""Pictures of attention weights."""

from __future__ import annotations

import numpy as np
import pytest

from spanformer.report.head_stats import CrossHeadStats, HeadStats
from spanformer.report.heatmap_pictures import head_picture, maps_picture

T = 9


def shifted(back):
    """[T, T] each token looks `back` tokens back, or at the first."""
    return np.eye(T)[np.maximum(np.arange(T) - back, 0)]


TOKENS = [f"t{n}" for n in range(T)]
MAPS = [np.stack([shifted(0), shifted(1)]), np.stack([shifted(3), shifted(0)])]


def test_every_head_has_a_panel_and_the_sentence_names_the_farthest(tmp_path):
    tokens = [*"$a b\ncdé", "token"]
    picture = maps_picture(HeadStats(MAPS, tokens, tokens), "a $run$")
    assert len(picture.figure.axes) == 4
    assert "head 1 of layer 2 looks farthest, 2.3 tokens back" in picture.sentence
    assert picture.save(tmp_path / "all.png").stat().st_size > 5000


@pytest.mark.parametrize("asked, found", [((0, 0), (2, 1)), ((1, 0), (1, 2)), ((0, 2), (1, 2)), ((2, 2), (2, 2))])
def test_farthest_of_those_asked_for(asked, found):
    assert HeadStats(MAPS, TOKENS, TOKENS).chosen(*asked) == found


@pytest.mark.parametrize("tokens", [T, 1])
def test_one_head_names_its_tokens(tmp_path, tokens):
    looks = HeadStats([m[:, :tokens, :tokens] for m in MAPS], TOKENS[:tokens], TOKENS[:tokens], "decoder")
    picture = head_picture(looks, 2, 1)
    axis = picture.figure.axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == TOKENS[:tokens]
    assert picture.name == "heatmap-decoder-layer2-head1" and picture.title == "Decoder: layer 2, head 1"
    assert picture.sentence == f"On average it looks {2.3 if tokens > 1 else 0:.1f} tokens back."
    assert picture.save(tmp_path / "one.png").stat().st_size > 1000


def test_cross_attention_heads_are_ranked_by_movement(tmp_path):
    still, moving = np.eye(3)[[2, 2, 2, 2]], np.eye(3)[[0, 0, 2, 2]]
    even = np.full((4, 3), 1 / 3)
    looks = CrossHeadStats([np.stack([still, even]), np.stack([moving, even])], [*"abcd"], [*"xyz"], "cross-attention")
    assert looks.chosen() == (2, 1) and looks.measure(moving) == 0.5 and looks.measure(still) == 0
    for picture in (maps_picture(looks, "m"), head_picture(looks, 2, 1)):
        below = [axis for axis in picture.figure.axes if axis.get_xlabel() == "source: token looked at"]
        assert [[label.get_text() for label in axis.get_xticklabels()] for axis in below] == [[*"xyz"]] * len(below)
        first = next(axis for axis in below if "target: written token" in axis.get_ylabel())
        assert [label.get_text() for label in first.get_yticklabels()] == [*"abcd"]
        assert picture.save(tmp_path / "two.png").stat().st_size > 1000
    assert "head 1 of layer 2 moves most over the source, 50 % of its attention" in looks.of_all()
