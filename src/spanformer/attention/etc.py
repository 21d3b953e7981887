"""ETC: Encoding Long and Structured Inputs in Transformers (Ainslie et al., 2020). https://arxiv.org/abs/2004.08483

    e_ij = q_i·(k_j + P[label_ij]) / √D − ∞·(1 − M_ij)        z_i = Σ_j softmax_j(e_ij)·v_j

Two inputs: a long one, and a few global tokens, for instance one for each sentence. Each token's softmax runs over long
and global tokens together, in four parts:

    l2l   |i − j| ≤ radius, labelled by the distance i − j, clipped to ±clip
    l2g   every global token, labelled by whether it belongs to i's segment
    g2g   every global token, labelled by the clipped distance
    g2l   every long token (with hard_g2l only those of its segment), labelled by whether it belongs to i's segment

Shapes: B batch, H heads, n long tokens, m global ones, D head size, N labels.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from spanformer.attention.base import Attention, View, given_terms, key_states, own_output, rotates
from spanformer.attention.etc_inputs import Projected, Structure, Two, check_inputs, hide
from spanformer.kinds import HeadSpec
from spanformer.ops import AnyRule, Attended, Rule, attend, merge

PARTS = ("l2l", "l2g", "g2g", "g2l")
TERMS = ("heads", "causal", "reach", "max_future", "ramp")
"""the terms of a rule that ETC takes"""
FARTHEST = 1 << 20  # tokens: every distance up to it has a separate row


class GlobalLocal(Attention):
    """ETC's attention. In a layer a text's global tokens come first, and `View.segments` gives the global token of each
    of the others. Label vectors start at zero: at first labels have no effect. `segment`: one global token for this
    many long ones. `own_projections`: separate projections for global queries and for the keys and values of l2g, g2g
    and g2l, which start as copies of the layer's; otherwise all use the layer's, as in the paper's models that start
    from BERT."""

    def __init__(
        self, heads: int, head_dim: int, radius: int, *, segment: int = 16, clip: int = 12, hard_g2l: bool = False,
        own_projections: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if heads < 1 or head_dim < 1:
            raise ValueError(f"heads is {heads} and head_dim {head_dim}; expected at least 1 each")
        if not (0 <= radius <= FARTHEST and 0 <= clip <= FARTHEST):
            raise ValueError(f"radius is {radius} and clip {clip}; expected numbers of tokens, 0 … {FARTHEST:,}")
        if segment < 1:
            raise ValueError(f"segment is {segment}; expected at least 1 token per global token")
        self.heads, self.radius, self.segment, self.clip, self.hard_g2l = heads, radius, segment, clip, hard_g2l
        self.causal = False
        self.l2l = nn.Parameter(torch.zeros(heads, 2 * clip + 1, head_dim))
        """[H, 2·clip + 1, D]: row d + clip for distance d = i − j, as in g2g"""
        self.g2g = nn.Parameter(torch.zeros(heads, 2 * clip + 1, head_dim))
        self.l2g = nn.Parameter(torch.zeros(heads, 2, head_dim))
        """[H, 2, D]: row 1 for a pair of one segment, 0 for others, as in g2l"""
        self.g2l = nn.Parameter(torch.zeros(heads, 2, head_dim))
        names = ("query", *(f"{which}_{part}" for part in PARTS[1:] for which in ("key", "value")))
        dim = heads * head_dim
        self.own = nn.ModuleDict({name: nn.Linear(dim, dim, bias=False) for name in names if own_projections})

    @classmethod
    def build(cls, spec: HeadSpec, own_projections: bool = False) -> GlobalLocal:
        if spec.causal:
            raise ValueError(
                f"{spec.kind} reads a whole text in both directions; expected model.kind 'encoder' (for show: "
                "--no-causal)"
            )
        if spec.kv_heads != spec.heads:
            raise ValueError(
                f"model.kv_heads is set, and {spec.kind} adds labels to the keys of every head; expected kv_heads 0"
            )
        p = spec.p
        return cls(
            spec.heads,
            spec.head_dim,
            p.radius,
            segment=p.segment,
            clip=p.clip,
            hard_g2l=bool(p.hard),
            own_projections=own_projections,
        )

    @classmethod
    def build_projected(cls, spec: HeadSpec) -> GlobalLocal:
        return cls.build(spec, own_projections=True)

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        reasons = own_output(self, cache=cache, mixed=mixed)
        if rotates(position):
            reasons.append(
                f"{type(position).__name__} rotates queries and keys, and the vectors of ETC's labels would not be "
                "rotated with them. Use absolute positions, or none"
            )
        if persistent and self.own:
            reasons.append(
                "model.persistent is set, and global tokens of etc_projected have separate queries; set persistent to 0"
            )
        return reasons

    def rule(self, view: View | None = None) -> Rule:
        """The rule of l2l; `forward` adds the other parts."""
        return Rule(self.heads, causal=False, reach=self.radius + 1, max_future=self.radius)

    def context_length(self) -> list[int]:
        return [self.radius] * self.heads

    def start_from(self, query: nn.Linear, key: nn.Linear, value: nn.Linear) -> None:
        for name in self.own:
            self.own[name] = copy.deepcopy({"query": query, "key": key, "value": value}[name.split("_")[0]])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        if view.segments is None:
            raise ValueError("view.segments is missing; expected the number [B, n] of each long token's global token")
        if others := given_terms(rule, view, TERMS):
            raise ValueError(
                f"{', '.join(others)} was given; ETC encodes distances by its labels and hides only "
                "padding; expected position kind none, sinusoidal or learned"
            )
        if k.shape[1] != self.heads:
            raise ValueError(
                f"k has {k.shape[1]} heads; expected {self.heads}, because ETC adds labels to the keys of every head"
            )
        m = k.shape[2] - view.segments.shape[1]
        (top_k, long_k), (top_v, long_v) = ((t[:, :, :m], t[:, :, m:]) for t in (k, v))
        of_long, of_top = (long_k, long_v), (top_k, top_v)
        given = Projected(q[:, :, m:], q[:, :, :m], of_long, of_top, of_top, of_long)
        hidden = (None, None) if view.padding is None else (view.padding[:, m:], view.padding[:, :m])
        given = self._project_own(given, view) if self.own else given
        long, top = self.two_streams(given, Structure(view.segments, *hidden))
        return Attended(torch.cat([top.out, long.out], 2), torch.cat([top.lse, long.lse], 2))

    def _project_own(self, given: Projected, view: View) -> Projected:
        """The same with separate projections."""
        x, m = key_states(view, self.heads * given.q_long.shape[3]), given.q_global.shape[2]
        of = {"g": x[:, :m].contiguous(), "l": x[:, m:].contiguous()}  # one copy for all products

        def made(name: str, stream: str) -> Tensor:
            t = self.own[name](of[stream])
            return t.view(*t.shape[:2], self.heads, -1).transpose(1, 2)

        parts = {part: (made(f"key_{part}", part[2]), made(f"value_{part}", part[2])) for part in PARTS[1:]}
        return given._replace(q_global=made("query", "g"), **parts)

    def two_streams(self, given: Projected, structure: Structure) -> tuple[Attended, Attended]:
        """Attention of the long tokens, out [B, H, n, D] and lse [B, H, n], and of the global ones, [B, H, m, ·]."""
        check_inputs(given, structure)
        m = given.q_global.shape[2]
        # A long token has the position of its segment's global token: pairs within a segment are at distance 0.
        at, places = structure.segments, torch.arange(m, device=structure.segments.device)
        no_token, no_global = hide(structure.long_padding), hide(structure.global_padding)
        long = merge(
            [
                self._by_distance(given.q_long, given.l2l, self.l2l, self.radius, no_token),
                *self._by_segment(given.q_long, given.l2g, self.l2g, (at, places), m, no_global),
            ]
        )
        top = merge(
            [
                self._by_distance(given.q_global, given.g2g, self.g2g, max(m - 1, 0), no_global),
                *self._by_segment(given.q_global, given.g2l, self.g2l, (places, at), m, no_token, self.hard_g2l),
            ]
        )
        return long, top

    def _by_distance(self, q: Tensor, kv: Two, table: Tensor, radius: int, bias: Tensor | None) -> Attended:
        """l2l and g2g: every key up to `radius` away, labelled by the clipped distance."""
        row = torch.arange(-radius, radius + 1, device=table.device).clamp(-self.clip, self.clip) + self.clip
        vectors = table.index_select(1, row)
        rule = Rule(
            self.heads, causal=False, reach=radius + 1, max_future=radius, distance_vec=vectors, key_bias=bias
        )  # fmt: skip
        return self._attend(q, kv, rule, None)

    def _by_segment(
        self, q: Tensor, kv: Two, table: Tensor, positions: Two, m: int, bias: Tensor | None,
        hard: bool = False,
    ) -> list[Attended]:  # fmt: skip
        """l2g and g2l: pairs within a segment, whose keys have one label, and all others, whose keys have the other.
        So no tensor of n × m pairs is made."""
        (k, v), vectors = kv, table.to(q.dtype)
        own = Rule(self.heads, causal=False, reach=1, key_bias=bias)
        found = [self._attend(q, (k + vectors[:, 1:], v), own, positions)]
        if not hard:
            not_own = torch.zeros(self.heads, m + 1, device=q.device)
            not_own[:, 0] = -math.inf
            others = Rule(self.heads, causal=False, distance_bias=not_own, key_bias=bias)
            found.append(self._attend(q, (k + vectors[:, :1], v), others, positions))
        return found

    def _attend(self, q: Tensor, kv: Two, rule: Rule, positions: Two | None) -> Attended:
        q_positions, k_positions = positions or (None, None)
        dropout = self.dropout if self.training else 0.0
        return attend(
            q, *kv, rule, backend=self.backend, dropout=dropout, q_positions=q_positions, k_positions=k_positions
        )  # fmt: skip

    def extra_repr(self) -> str:
        hard = ", hard_g2l=True" if self.hard_g2l else ""
        return f"heads={self.heads}, radius={self.radius}, segment={self.segment}, clip={self.clip}{hard}"
