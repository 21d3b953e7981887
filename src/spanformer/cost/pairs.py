"""The number of query–key pairs that one head sees, for each pattern: exact, edges included.

A head reads n tokens at positions 0 … n − 1; i is a query, j a key, d = i − j. `causal` allows only keys with d ≥ 0;
otherwise a pattern over distances applies to |d|. Every function takes (n, causal) and then the pattern's parameters,
and loops over blocks at most, never over pairs.
"""

from __future__ import annotations

import math

from spanformer.cost.attention import head_pairs


def full(n: int, causal: bool) -> int:
    """every pair"""
    return n * (n + 1) // 2 if causal else n * n


def window(n: int, causal: bool, w: int) -> int:
    """|d| < w"""
    back = head_pairs(w, n, n)
    return back if causal else 2 * back - min(n, n * w)


def dilated(n: int, causal: bool, w: int, s: int) -> int:
    """d = 0, s, 2s, … (w − 1)·s"""
    return _distances(n, causal, range(0, min(n, w * s), s))


def strided(n: int, causal: bool, stride: int) -> int:
    """|d| < ℓ or ℓ divides d: Sparse Transformer's strided pattern, both parts in one head"""
    return window(n, causal, stride) + _distances(n, causal, range(stride, n, stride))


def fixed(n: int, causal: bool, block: int, c: int) -> int:
    """the query's own block of ℓ, and the last c positions of every block: Sparse Transformer's fixed pattern"""
    c, total = min(c, block), 0
    ends = sum(max(0, size - (block - c)) for _, size in _blocks(n, block))
    for start, size in _blocks(n, block):
        others = start // block * c if causal else ends - max(0, size - (block - c))
        total += full(size, causal) + size * others
    return total


def strided_heads(n: int, causal: bool, stride: int) -> float:
    """|d| ≤ l in half of the heads, and multiples of l in the other half"""
    return (window(n, causal, stride + 1) + _distances(n, causal, range(0, n, stride))) / 2


def fixed_heads(n: int, causal: bool, block: int, c: int) -> float:
    """the query's own block in half of the heads, and the last c positions of every block in the other half"""
    own, c, ends = image_1d(n, causal, block, 0), min(c, block), 0
    for start, size in _blocks(n, block):  # key j is seen by the queries from j on, or by all
        last = range(start + block - c, min(start + block, start + size))
        ends += sum(n - j if causal else n for j in last)
    return (own + ends) / 2


def sinks(n: int, causal: bool, w: int, sink_tokens: int) -> int:
    """|d| < w, and the first `sink_tokens` tokens"""
    return window(n, causal, w) + _front(n, causal, w, 1, sink_tokens)


def longformer(n: int, causal: bool, w: int, g: int, s: int) -> int:
    """w tokens back, or w/2 to either side, s apart; and g global tokens at the start, which see all tokens and are
    seen by all"""
    side, g = (w if causal else w // 2 + 1), min(g, n)
    front = _front(n, causal, side, s, g)
    if causal:
        return dilated(n, True, side, s) + front
    twice = g * g - dilated(g, False, side, s)  # both of them global, beyond the window
    return dilated(n, False, side, s) + 2 * front - twice


def etc(n: int, causal: bool, radius: int, segment: int, clip: int, hard: int) -> int:
    """one global token per s tokens: global to global, long to global, global to long (hard: within its own segment),
    and long to long where |d| ≤ r; the number of labels does not matter"""
    if causal:
        raise ValueError("etc needs the whole text in both directions; use --no-causal")
    g = -(-n // segment)
    return g * g + g * n + (n if hard else g * n) + window(n, False, radius + 1)


def big_bird(n: int, causal: bool, block: int, near: int, g: int, drawn: int) -> int:
    """blocks of b: `near` around the query's own block (causal: only earlier ones), the first g, and `drawn` random
    others; the first g blocks see all tokens"""
    sizes = [size for _, size in _blocks(n, block)]
    side, total = near // 2, 0
    for row, size in enumerate(sizes):
        last = row if causal else len(sizes) - 1
        if row < g:
            seen = set(range(last + 1))
        else:
            seen = {c for c in range(row - side, row + (0 if causal else side) + 1) if 0 <= c <= last}
            seen |= set(range(min(g, last + 1)))
            ragged = sizes[last] < block and last not in seen  # random blocks are complete
            total += size * block * min(drawn, last + 1 - len(seen) - ragged)
        total += sum(full(size, True) if causal and c == row else size * sizes[c] for c in seen)
    return total


def blockwise(n: int, causal: bool, blocks: int, size: int, shift: int) -> int:
    """groups of `blocks` blocks of l: queries of a block see the block `shift` before it, cyclically"""
    sizes = [tokens for _, tokens in _blocks(n, size)]
    total = 0
    for row, queries in enumerate(sizes):
        column = row // blocks * blocks + (row % blocks - shift) % blocks
        if column == row:
            total += full(queries, causal)
        elif column < len(sizes) and (column < row or not causal):
            total += queries * sizes[column]
    return total


def image_1d(n: int, causal: bool, block: int, memory: int) -> int:
    """blocks of l: a query sees its own block and m tokens before it (in both directions: also after it)"""
    total = 0
    for start, size in _blocks(n, block):
        after = 0 if causal else min(memory, n - start - size)
        total += full(size, causal) + size * (min(start, memory) + after)
    return total


def image_2d(n: int, causal: bool, width: int, high: int, wide: int, above: int, beside: int) -> int:
    """an image of `width` pixels per line, read in blocks of h × w: a query sees its own block, lines above and columns
    beside it; the future is all later blocks, and later pixels of its own block"""
    if width % wide:
        raise ValueError(f"width is {width}; expected a multiple of wide, {wide}")
    area, total = high * wide, 0
    for start, size in _blocks(n, area):
        top, left = start // area // (width // wide) * high, start // area % (width // wide) * wide
        before, after = min(beside, left), min(beside, width - left - wide)
        lines = min(above, top)
        if causal:  # to the right of its own block, only the lines above were read before
            total += full(size, True) + size * (lines * (before + wide + after) + high * before)
        else:
            total += size * _pixels(n, width, high, wide, top - lines, top + high, left - before, left + wide + after)
    return total


def buckets(n: int, count: int, w: int, *, itself: bool) -> int:
    """the last w tokens of the query's bucket, if n tokens are dealt to `count` buckets in turn; w includes the token
    itself if it sees itself"""
    small, larger = divmod(n, count)
    each = [(small + 1, larger), (small, count - larger)]
    return sum(times * head_pairs(w, size if itself else max(size - 1, 0), size if itself else max(size - 1, 0))
               for size, times in each)  # fmt: skip


def even_factors(count: int) -> tuple[int, int]:
    """two even numbers, as close as possible, whose product is `count`"""
    first = next(a for a in range(math.isqrt(count) // 2 * 2, 1, -2) if count % a == 0 and count // a % 2 == 0)
    return first, count // first


def ring_numbers(d: int, count: int, w: int, rounds: int) -> int:
    """size of the rings of w tokens for each of `count` buckets and rounds, in numbers of 4 bytes: keys, values and
    positions of 8 bytes; and the token count of each bucket"""
    slot = 2 * d + 2 * (rounds + 1)
    return rounds * ((count * w + 1) * slot + 2 * count)


def random(n: int, causal: bool, r: int) -> int:
    """r random keys per query, among those it may see"""
    return head_pairs(r, n, n) if causal else n * min(r, n)


def _distances(n: int, causal: bool, distances: range) -> int:
    """Pairs at these distances; the first may be 0."""
    total = sum(n - d for d in distances if d < n)
    return total if causal else 2 * total - (n if len(distances) and distances[0] == 0 else 0)


def _front(n: int, causal: bool, w: int, s: int, g: int) -> int:
    """Pairs with the first g keys that are outside a window of w tokens, s apart."""
    keys = range(min(g, n))
    behind = sum(n - j - min(w, (n - 1 - j) // s + 1) for j in keys)
    return behind if causal else behind + sum(j - min(w - 1, j // s) for j in keys)


def _blocks(n: int, size: int) -> list[tuple[int, int]]:
    """(start, tokens) of each block; the last may be shorter."""
    return [(start, min(size, n - start)) for start in range(0, n, size)]


def _pixels(n: int, width: int, high: int, wide: int, top: int, bottom: int, left: int, right: int) -> int:
    """Number of pixels of a rectangle that are among the first n tokens, read block by block."""
    across, found = width // wide, 0
    for row in range(top // high, -(-bottom // high)):
        for column in range(left // wide, -(-right // wide)):
            tokens = min(high * wide, max(0, n - (row * across + column) * high * wide))
            x0, x1 = max(left - column * wide, 0), min(right - column * wide, wide)
            for line in range(max(top - row * high, 0), min(bottom - row * high, high)):
                found += max(0, min(x1, tokens - line * wide) - x0)
    return found
