"""Pictures of attention weights."""

from __future__ import annotations

import numpy as np
import pytest

from spanformer.report.heatmap_pictures import farthest, head_picture, maps_picture

T = 9


def shifted(back):
    """[T, T] each token looks `back` tokens back, or at the first."""
    return np.eye(T)[np.maximum(np.arange(T) - back, 0)]


MAPS = [np.stack([shifted(0), shifted(1)]), np.stack([shifted(3), shifted(0)])]


def test_every_head_has_a_panel_and_the_sentence_names_the_farthest(tmp_path):
    picture = maps_picture(MAPS, [*"$a b\ncdé", "token"], "a $run$")
    assert len(picture.figure.axes) == 4
    assert "head 1 of layer 2 looks farthest, 2.3 tokens back" in picture.sentence
    assert picture.save(tmp_path / "all.png").stat().st_size > 5000


@pytest.mark.parametrize("asked, found", [((0, 0), (2, 1)), ((1, 0), (1, 2)), ((0, 2), (1, 2)), ((2, 2), (2, 2))])
def test_the_farthest_of_those_asked_for(asked, found):
    assert farthest(MAPS, *asked) == found


@pytest.mark.parametrize("tokens", [T, 1])
def test_one_head_names_its_tokens(tmp_path, tokens):
    picture = head_picture(shifted(1)[:tokens, :tokens], [f"t{n}" for n in range(tokens)], 3, 2)
    axis = picture.figure.axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == [f"t{n}" for n in range(tokens)]
    assert picture.name == "heatmap-layer3-head2"
    assert picture.save(tmp_path / "one.png").stat().st_size > 1000
