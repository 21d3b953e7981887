"""Named reach profiles: how far each head looks, and the spans that make it so.

A  one head sees everything, the rest 64 tokens (what training finds: most heads short, a few long)
B  32, 48, 64, 96, 160, 256, 1024 and everything, in turn
S  every head 64        M  every head 512        F  every head everything
a number: every head that many tokens
"""

from __future__ import annotations

RAMP = 32
NAMES = ("A", "B", "S", "M", "F")
_STEPS = (32, 48, 64, 96, 160, 256, 1024)
_UNIFORM = {"S": 64, "M": 512}


def reaches(profile: str, heads: int, length: int) -> list[int]:
    """How many tokens each head sees, itself included; never more than the length."""
    if profile == "A":
        wanted = [64] * (heads - 1) + [length]
    elif profile == "B":
        cycle = (*_STEPS, length)
        wanted = [cycle[(h + len(cycle) - heads) % len(cycle)] for h in range(heads)]  # the last head sees everything
    elif profile == "F":
        wanted = [length] * heads
    else:
        wanted = [_uniform(profile)] * heads
    return [min(r, length) for r in wanted]


def spans(profile: str, heads: int, length: int, ramp: int = RAMP, *, between: bool = False) -> list[float]:
    """z per head: a head of reach r < length has r − ramp, so that its soft edge ends at r; a full head has `length`.

    between=True takes half a token off the short ones. They reach as far, but no distance then falls on an edge of the
    ramp, where the original's gradient and the strict one differ.
    """
    half = 0.5 if between else 0.0
    return [float(length) if r >= length else max(0.0, r - ramp - half) for r in reaches(profile, heads, length)]


def uniform_reach(profile: str) -> int | None:
    """The reach every head shares, if the profile is of that kind ("F" is not: it grows with the length)."""
    return None if profile in ("A", "B", "F") else _uniform(profile)


def _uniform(profile: str) -> int:
    if profile in _UNIFORM:
        return _UNIFORM[profile]
    if not profile.isdigit() or int(profile) < RAMP:
        raise ValueError(f"profile is {profile!r}; expected {', '.join(NAMES)} or a number of tokens from {RAMP} up")
    return int(profile)
