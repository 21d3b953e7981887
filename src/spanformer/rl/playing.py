"""Acting step by step: by a KV cache where every layer has one, else by the memory of training.

The memory of training holds hidden states, which each step would project again. A player with rings projects them once,
at the start of a window, with the weights of that window; then a step costs one query per head. Rows begin episodes at
different steps: each ring starts again at position 0, and positions are relative.

Shapes: N rows, M remembered steps.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from spanformer.attention import View, remembers_itself
from spanformer.memory import HeadCache, HiddenStates
from spanformer.model.decoding import RingMemory, Step, make_cache
from spanformer.rl.memory import PolicyMemory, Segments
from spanformer.rl.policy import Policy, PolicyStack, Seen, TransformerCore


class Choice(NamedTuple):
    logits: Tensor
    """[N, A]"""
    value: Tensor
    """[N]"""


class Player(Protocol):
    def step(self, seen: Seen) -> Choice:
        """One step [N, 1] of every row, which it remembers."""
        ...

    def peek(self, seen: Seen) -> Choice:
        """The same without remembering it; seen belongs to the episodes of the last step."""
        ...

    def memory(self) -> PolicyMemory:
        """The memory after these steps, as training needs it."""
        ...


class SegmentPlayer:
    """Any policy, by the memory of training."""

    def __init__(self, policy: Policy, memory: PolicyMemory) -> None:
        self.policy, self.held = policy, memory

    @torch.no_grad()
    def step(self, seen: Seen) -> Choice:
        found = self.policy(seen, self.held)
        self.held = found.memory
        return Choice(found.logits[:, 0], found.value[:, 0])

    @torch.no_grad()
    def peek(self, seen: Seen) -> Choice:
        found = self.policy(seen, self.held)
        return Choice(found.logits[:, 0], found.value[:, 0])

    def memory(self) -> PolicyMemory:
        return self.held


class RingPlayer:
    """A transformer, by a KV cache that begins with the steps in its memory."""

    @torch.no_grad()
    def __init__(self, policy: Policy, stack: PolicyStack, memory: Segments, *, record: bool) -> None:
        """record: keep what `memory` needs."""
        self.policy, self.stack, self.before, self.record = policy, stack, memory.state, record
        state, rows = memory.state, memory.count()
        self.cache = make_cache(stack, rows, 0, 0)
        stack.decoding_rules.renew(stack, self.cache)
        self.place = self.cache.place
        self.episode = torch.full((rows,), -1) if state.documents is None else state.documents[:, -1]
        self.steps: list[tuple[list[Tensor], Tensor]] = []
        """the states of each layer and the episodes, of each step"""
        if state.documents is not None and state.documents.shape[1]:
            self._fill(state.documents)

    def _fill(self, documents: Tensor) -> None:
        """Store the keys and values of the remembered steps [N, M] of each row's episode, from position 0 on."""
        same = (documents == self.episode[:, None]).sum(1)  # an episode is one stretch
        for n, (block, layer) in enumerate(zip(self.stack.layers(), self.before.layers, strict=True)):
            assert isinstance(layer, HiddenStates)
            held, ring = layer.tokens, self.cache.layers[n]
            assert isinstance(ring, HeadCache)
            real = same.clamp(max=held)
            at = (torch.arange(held) + (same - real)[:, None], (held - real)[:, None] + torch.arange(held))
            states = layer.states.gather(
                1, at[1].clamp(max=held - 1)[..., None].expand(-1, -1, layer.states.shape[2])
            )  # each row's own steps first
            k, v = block.attention.project(states)
            encode = self.stack.positions()[n].encode_at(lambda at=at: at[0], states.dtype)
            if encode is not None:
                k = encode(k.new_zeros(len(k), block.attention.heads, *k.shape[2:]), k)[1]
            self._store(ring, k, v, same - real, real)
        self.place.copy_(same)

    def _store(self, ring: HeadCache, k: Tensor, v: Tensor, first: Tensor, real: Tensor) -> None:
        """Store the first `real` [N] tokens of each row at positions first [N] …"""
        self.place.copy_(first)
        ring.store_tokens(k, v, real)

    def _run(self, seen: Seen) -> tuple[Choice, list[Tensor]]:
        h = self.policy.embed(seen)
        step = Step(self.place, seen.action, None)
        rules = self.stack.decoding_rules
        memories = [RingMemory(ring, rules, n, step) for n, ring in enumerate(self.cache.rings())]
        x, _ = self.stack.run_blocks(h, memories, View(), lambda position, h: h)
        logits, value = self.policy.decide(self.stack.norm(x))
        return Choice(logits[:, 0], value[:, 0]), [memory.latest for memory in memories]

    @torch.no_grad()
    def step(self, seen: Seen) -> Choice:
        episode = seen.episode[:, 0]
        self.place.masked_fill_(episode != self.episode, 0)
        choice, states = self._run(seen)
        self.place += 1
        self.episode = episode
        if self.record:
            self.steps.append((states, seen.episode))
        return choice

    @torch.no_grad()
    def peek(self, seen: Seen) -> Choice:
        return self._run(seen)[0]  # the next step overwrites what it stored

    def memory(self) -> PolicyMemory:
        if not self.steps:
            return Segments(self.before)
        layers = zip(*(states for states, _ in self.steps), strict=True)
        new = [torch.cat(states, 1) for states in layers]
        return Segments(self.stack.remember(self.before, new, torch.cat([episode for _, episode in self.steps], 1)))


def make_player(policy: Policy, memory: PolicyMemory, *, record: bool) -> Player:
    """record: whether `memory()` will be asked for."""
    core = policy.core
    if isinstance(core, TransformerCore) and isinstance(memory, Segments) and has_rings(core.stack):
        return RingPlayer(policy, core.stack, memory, record=record)
    return SegmentPlayer(policy, memory)


def has_rings(stack: PolicyStack) -> bool:
    """Whether a KV cache gives what its memory of training gives: every layer keeps keys and values of a rule that
    depends on distances only."""
    config = stack.config
    if config.paper_compat or stack.depth is not None:
        return False
    return all(
        mechanism.rule_needs() == "nothing"
        and not mechanism.sink_tokens
        and not remembers_itself(mechanism)
        and not remembers_itself(mechanism, decoding=True)
        and not mechanism.supports(position=position, cache=True)
        for mechanism, position in zip(stack.mechanisms(), stack.positions(), strict=True)
    )
