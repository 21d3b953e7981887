"""Profiles: reaches, the spans that give them, and the rule they make."""

import pytest

from spanformer.bench import profiles
from spanformer.bench.work import Work, make_inputs


@pytest.mark.parametrize(
    "profile, expected",
    [
        ("A", [64] * 7 + [2048]),
        ("B", [32, 48, 64, 96, 160, 256, 1024, 2048]),
        ("S", [64] * 8),
        ("M", [512] * 8),
        ("F", [2048] * 8),
        ("128", [128] * 8),
    ],
)
def test_rule_reaches_as_far_as_its_profile_says(profile, expected):
    assert profiles.reaches(profile, 8, 2048) == expected
    limits = make_inputs(Work(profile, 2048, dim=2)).rule().limits()
    assert [min(limit, 2048) for limit in limits] == expected


def test_half_a_token_less_reaches_as_far():
    between = make_inputs(Work("A", 256, streaming=16, terms="distance_vec", dim=2)).rule()
    assert [min(limit, 256) for limit in between.limits()] == [64] * 7 + [256]
    assert between.span[0] == 31.5


def test_reach_is_at_most_the_length():
    assert profiles.reaches("S", 2, 16) == [16, 16]
    assert profiles.spans("S", 2, 16) == [16.0, 16.0]


@pytest.mark.parametrize("profile", ["Q", "", "16", "-64", "1.5"])
def test_unknown_profiles_are_refused(profile):
    with pytest.raises(ValueError, match="expected A, B, S, M, F or a number"):
        profiles.reaches(profile, 8, 128)


def test_unknown_works_are_refused():
    for wrong in ({"mode": "backward"}, {"terms": "rope"}, {"dtype": "int8"}, {"batch": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Work("A", 64, **wrong)
