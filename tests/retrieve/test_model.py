"""A language model with its datastore: keys, building, resuming, and predictions in every way of running it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spanformer.data.vocab import Bytes
from spanformer.infer import Sampling, generate, score
from spanformer.retrieve import Settings, Store
from spanformer.retrieve.build import Plan, build_store
from spanformer.retrieve.fit import look
from spanformer.retrieve.mixture import Retrieval
from spanformer.retrieve.model import LmKeys, check_made, retrieving
from support.small_models import CONFIGS, SMALL, make
from support.stores import knn_by_hand

NAMES = ["rotary", "paper", "experts", "adaptive embedding", "tied"]


def text(count: int, vocab: int = 37, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, count)


def model_of(name: str) -> LmKeys:
    return LmKeys(make(CONFIGS[name]).float(), name=name)


def keys_by_hand(keys: LmKeys, ids: np.ndarray) -> torch.Tensor:
    """[n, D]: what the last feed-forward reads, from one pass over the text."""
    seen: list[torch.Tensor] = []
    handle = keys.feedforward.register_forward_pre_hook(lambda _m, x: seen.append(x[0]))
    with torch.no_grad():
        keys.lm(torch.from_numpy(ids)[None])
    handle.remove()
    return torch.cat(seen)[0]


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_is_a_context_and_the_token_after_it(tmp_path: Path, name: str) -> None:
    keys, ids = model_of(name), text(90)
    built = build_store(keys, ids, tmp_path, Plan("float32", context=200))
    store = Store(tmp_path)
    assert built.added == len(store) == 89 and store.tokens.tolist() == ids[1:].tolist()
    expected = keys_by_hand(keys, ids[:-1])
    assert torch.allclose(store.parts[0].keys, expected, rtol=1e-5, atol=1e-5)
    if keys.lm.config.order == "pre":  # the input of the feed-forward is normed
        assert float((expected.square().mean(-1) - 1).abs().mean()) < 0.5


@pytest.mark.parametrize("stop", [1, 3])
def test_a_build_that_was_stopped_continues(tmp_path: Path, stop: int) -> None:
    keys, ids = model_of("rotary"), text(230)
    plan, count = Plan("int8", context=32), 0

    def interrupt(done: int, _total: int) -> None:
        nonlocal count
        count += 1
        if count == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store(keys, ids, tmp_path / "stopped", plan, on_count=interrupt, shard_entries=64)
    resumed = build_store(keys, ids, tmp_path / "stopped", plan, shard_entries=64)
    build_store(keys, ids, tmp_path / "whole", plan, shard_entries=64)
    assert resumed.before == 32 * stop and resumed.before + resumed.added == 229
    stopped, whole = Store(tmp_path / "stopped"), Store(tmp_path / "whole")
    assert stopped.tokens.tolist() == whole.tokens.tolist()
    assert torch.equal(*(torch.cat([part.keys for part in store.parts]) for store in (stopped, whole)))
    assert build_store(keys, ids, tmp_path / "whole", plan).added == 0  # all of it is there


def test_another_text_is_appended(tmp_path: Path) -> None:
    keys = model_of("rotary")
    for seed in (0, 1):
        build_store(keys, text(70, seed=seed), tmp_path, Plan(context=32))
    assert len(Store(tmp_path)) == 138
    with pytest.raises(ValueError, match="has keys int8; expected the same to append to it, and float32 is asked for"):
        build_store(keys, text(70), tmp_path, Plan("float32", context=32))
    with pytest.raises(ValueError, match="the text has 1 tokens; expected 2 or more"):
        build_store(keys, text(1), tmp_path, Plan(context=32))


def test_directions_are_kept(tmp_path: Path) -> None:
    keys = model_of("rotary")
    build_store(keys, text(200), tmp_path, Plan("int8", pca=9, context=32))
    build_store(keys, text(60, seed=1), tmp_path, Plan("int8", pca=9, context=32))
    store = Store(tmp_path)
    assert store.parts[0].keys.shape[1] == 9 and len(store) == 258
    assert store.header.entry_bytes == 9 + 4 + 2
    with pytest.raises(ValueError, match="pca is 32, and the text gives 49 keys to find directions; expected 128"):
        build_store(keys, text(50), tmp_path / "few", Plan(pca=32, context=50))


@pytest.mark.parametrize("name", NAMES)
def test_predictions_are_the_mixture_however_the_model_runs(tmp_path: Path, name: str) -> None:
    keys, ids = model_of(name), text(60, seed=3)
    lm, x = keys.lm, torch.from_numpy(ids)[None]
    build_store(keys, text(150), tmp_path, Plan("float32", context=200))
    store = Store(tmp_path)
    with torch.no_grad():
        plain = lm(x).logits[0].double().log_softmax(-1)
    queries = keys_by_hand(keys, ids)
    near = torch.stack([knn_by_hand(store.parts[0].keys, store.tokens, q, 8, 5.0, 37) for q in queries])
    truth = (0.4 * near + 0.6 * plain.exp()).log()
    before = {name: value.clone() for name, value in lm.state_dict().items()}
    with retrieving(lm, Retrieval(store, Settings(8, 5.0, 0.4)), keys.maker), torch.no_grad():
        whole = lm(x).logits[0]
        first = lm(x[:, :25])
        by_segment = torch.cat([first.logits, lm(x[:, 25:], first.state).logits], 1)[0]
        losses = lm(x[:, :-1], targets=x[:, 1:]).nll[0]
        cache = lm.cache(1)
        decoded = torch.cat([lm.decode(x[:, n : n + 1], cache) for n in range(60)], 1)[0]
        last = lm.decode(x, lm.cache(1), logits="last")[0]
        assert lm.state_dict().keys() == before.keys()
    for found in (whole, by_segment, decoded):
        assert torch.allclose(found.double(), truth, atol=2e-4)
    assert torch.allclose(last.double(), truth[-1], atol=2e-4)
    assert torch.allclose(losses.double(), -truth[:-1].gather(1, x[0, 1:, None])[:, 0], atol=2e-4)
    with torch.no_grad():
        assert torch.equal(lm(x).logits[0].double().log_softmax(-1), plain)  # restored


def test_share_0_and_an_empty_store_change_no_bit(tmp_path: Path) -> None:
    keys, x = model_of("rotary"), torch.from_numpy(text(60, seed=3))[None]
    build_store(keys, text(80), tmp_path, Plan(context=200))
    with torch.no_grad():
        plain, losses = keys.lm(x).logits, keys.lm(x, targets=x).nll
        step = keys.lm.decode(x, keys.lm.cache(1))
    store = Store(tmp_path)
    empty = Store(tmp_path)
    empty.parts.clear()
    for settings, each in ((Settings(4, 1.0, 0.0), store), (Settings(4, 1.0, 0.5), empty)):
        with retrieving(keys.lm, Retrieval(each, settings), keys.maker), torch.no_grad():
            assert torch.equal(keys.lm(x).logits, plain) and torch.equal(keys.lm(x, targets=x).nll, losses)
            assert torch.equal(keys.lm.decode(x, keys.lm.cache(1)), step)


def test_scoring_and_generation_use_the_store(tmp_path: Path) -> None:
    keys, ids = model_of("rotary"), np.tile(text(30), 8)
    build_store(keys, ids, tmp_path, Plan("float32", context=200))
    retrieval = Retrieval(Store(tmp_path), Settings(4, 1.0, 0.9))
    before = sum(float(part.nats.sum()) for part in score(keys.lm, [ids]))
    with retrieving(keys.lm, retrieval, keys.maker):
        after = sum(float(part.nats.sum()) for part in score(keys.lm, [ids]))
        made = [piece.id for piece in generate(keys.lm, ids[:95], max_tokens=30, sampling=Sampling(0.0))]
    assert after < before / 2 and retrieval.searched > 200
    assert made == ids[95:125].tolist()  # it copies what the store remembers


def test_looking_at_held_out_text(tmp_path: Path) -> None:
    keys, ids = model_of("rotary"), text(100, seed=5)
    build_store(keys, text(150), tmp_path, Plan("float32", context=40))
    store = Store(tmp_path)
    seen = look(keys, store, ids, 6)
    with torch.no_grad():
        found = [keys.lm(torch.from_numpy(ids[a : a + 41])[None]).logits[0, :-1] for a in (0, 40)]
    log_probs = torch.cat(found).double().log_softmax(-1)
    expected = -log_probs.gather(1, torch.from_numpy(ids[1:81])[:, None])[:, 0]
    assert torch.allclose(seen.nll[:80], expected, atol=1e-5) and len(seen.nll) == 99
    near = seen.near(3.0)
    query = keys_by_hand(keys, ids[:40])[7]
    by_hand = knn_by_hand(store.parts[0].keys, store.tokens, query, 6, 3.0, 37)
    assert abs(float(near[7] - by_hand[ids[8]])) < 1e-5


def test_other_models_are_refused(tmp_path: Path) -> None:
    keys = model_of("rotary")
    build_store(keys, text(80), tmp_path, Plan(context=200))
    store, settings = Store(tmp_path), Settings()
    other = LmKeys(make(CONFIGS["rotary"]).float())
    with torch.no_grad():
        next(other.lm.parameters()).add_(1e-3)  # same width, same names
    other = LmKeys(other.lm)
    cases = {
        "another set of weights, spans or settings": other,
        "another dtype: 'float32', and this model has 'float64'": LmKeys(make(CONFIGS["rotary"])),
        "another tokenizer": LmKeys(make(CONFIGS["rotary"]).float(), Bytes()),
    }
    for sentence, wrong in cases.items():
        with pytest.raises(ValueError, match=sentence), retrieving(wrong.lm, Retrieval(store, settings), wrong.maker):
            pass
        with pytest.raises(ValueError, match=sentence):
            build_store(wrong, text(80), tmp_path, Plan(context=200))


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Also if digests agree: a header that was edited."""
    keys = model_of("rotary")
    build_store(keys, text(80), tmp_path, Plan(context=200))
    for dim, vocab in ((keys.dim + 1, keys.vocab), (keys.dim, keys.vocab + 5)):
        with pytest.raises(ValueError, match=rf"has keys of {keys.dim} numbers and a vocabulary of {keys.vocab}; exp"):
            check_made(Store(tmp_path), keys.maker, dim, vocab)


def test_models_without_a_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the last layer has no feed-forward, whose input is the key"):
        LmKeys(make(CONFIGS["persistent"]).float())
    reversible = LmKeys(make(replace(SMALL, stack="reversible")).float())
    build_store(reversible, text(80), tmp_path, Plan(context=200))
    with (
        pytest.raises(ValueError, match="stack is 'reversible'"),
        retrieving(reversible.lm, Retrieval(Store(tmp_path), Settings()), reversible.maker),
    ):
        pass
