"""Named profiles: the reach of each head, and the spans that give it.

A  one head sees all tokens, the others 64 (typical after training: most heads short, a few long)
B  32, 48, 64, 96, 160, 256, 1024 and all tokens, in turn
S  all heads 64        M  all heads 512        F  all heads see all tokens
a number: that many tokens for all heads
"""

from __future__ import annotations

RAMP = 32
NAMES = ("A", "B", "S", "M", "F")
_STEPS = (32, 48, 64, 96, 160, 256, 1024)
_UNIFORM = {"S": 64, "M": 512}


def reaches(profile: str, heads: int, length: int) -> list[int]:
    """Number of tokens that each head sees, itself included; at most the length."""
    if profile == "A":
        wanted = [64] * (heads - 1) + [length]
    elif profile == "B":
        cycle = (*_STEPS, length)
        wanted = [cycle[(h + len(cycle) - heads) % len(cycle)] for h in range(heads)]  # the last head sees all tokens
    elif profile == "F":
        wanted = [length] * heads
    else:
        wanted = [_uniform(profile)] * heads
    return [min(r, length) for r in wanted]


def spans(profile: str, heads: int, length: int, ramp: int = RAMP, *, between: bool = False) -> list[float]:
    """z per head: r − ramp for a head of reach r < length, so that its ramp ends at r; `length` for a full head.

    between=True shortens these spans by half a token. The reach is the same, but no distance is then on an edge of the
    ramp, where the original's gradient differs from the exact one.
    """
    half = 0.5 if between else 0.0
    return [float(length) if r >= length else max(0.0, r - ramp - half) for r in reaches(profile, heads, length)]


def uniform_reach(profile: str) -> int | None:
    """The reach that all heads share, or None ("F" has none: its reach grows with the length)."""
    return None if profile in ("A", "B", "F") else _uniform(profile)


def _uniform(profile: str) -> int:
    if profile in _UNIFORM:
        return _UNIFORM[profile]
    if not profile.isdigit() or int(profile) < RAMP:
        raise ValueError(f"profile is {profile!r}; expected {', '.join(NAMES)} or a number of tokens, at least {RAMP}")
    return int(profile)
