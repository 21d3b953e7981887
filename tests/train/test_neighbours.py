"""SPALM in a run: neighbours are found once, are those of each token, give nothing away; resumed to the last bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from spanformer.cli.retrieval import with_neighbours
from spanformer.data import prepare
from spanformer.infer import Sampling, generate, score
from spanformer.model.load import load, load_meta
from spanformer.retrieve.spalm import neighbour_tokens
from spanformer.retrieve.store import Store
from spanformer.train.evaluate import evaluate
from spanformer.train.neighbours import Neighbours, frozen_keys, open_search, read_neighbours
from spanformer.train.objective import make_objective
from spanformer.train.run import train, with_vocab
from support.same_runs import final
from support.tiny_runs import tiny, write_text

TIED = {"model.embedding.tied": True, "model.attention.kind": "window(24)", "model.position.kind": "rotary"}
MODEL = TIED | {"model.neighbours": 3, "retrieve.window": 4, "train.save_every": 0, "train.steps": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A frozen model, and a run that retrieves by it."""
    path = tmp_path_factory.mktemp("spalm")
    train(tiny(path, TIED | {"out": str(path / "frozen"), "train.steps": 20}))
    train(spalm(path))
    return path


def spalm(path: Path, out: str = "run", **changes):
    more = {name.replace("__", "."): value for name, value in changes.items()}
    return tiny(path, MODEL | {"out": str(path / out), "retrieve.model": str(path / "frozen")} | more)


def test_each_token_gets_its_neighbours(folder: Path) -> None:
    config = spalm(folder)
    data = prepare(config.data)
    config = with_vocab(config, data)
    ids = data.splits["train"].ids
    keys = frozen_keys(config, data.vocab.to_json())
    store = Store(folder / "run/datastore")
    assert len(store) == len(ids) - 1
    truth = neighbour_tokens(keys, store, ids, 3, window=4)
    near = read_neighbours(folder / "run", "train", len(ids), 3)
    assert near.tokens.tolist() == truth.tolist() and (truth >= 0).mean() > 0.99
    objective = make_objective(data, config, slice(1, 3))
    for _ in range(400):  # into the second epoch, whose blocks begin elsewhere
        drawn = objective.draw().arguments
    assert objective.stream.epoch > 0 and drawn["neighbours"].shape == (2, 16, 3)
    for row, x in enumerate(drawn["x"].numpy()):
        (at,) = [n for n in range(len(ids) - 17) if (ids[n : n + 16] == x).all()][:1]
        assert drawn["neighbours"][row].tolist() == truth[at : at + 16].tolist()
    last = Neighbours(truth).at(np.array([len(ids) - 3]), 4)
    assert last[0].tolist() == truth[[-2, -1, -1, -1]].tolist()


def test_training_uses_the_gate_and_a_resumed_run_ends_the_same(folder: Path) -> None:
    whole = final(folder / "run")[1]
    for n, last in enumerate((2, 6)):
        train(spalm(folder, "parts", train__steps=last, resume=n > 0))
    parts = final(folder / "parts")[1]
    for part in ("model", "memory", "optimizer"):
        assert whole[part] and list(whole[part]) == list(parts[part])
        for name, t in whole[part].items():
            assert torch.equal(t, parts[part][name]), name
    gate = load(folder / "run").gate
    assert gate is not None and float(gate.weight.detach().abs().max()) > 0


def test_scores_by_own_search_are_those_of_found_neighbours(folder: Path) -> None:
    """Reading, the frozen model searches as it did before training: the validation text has no own entries."""
    config, lm, meta = spalm(folder), load(folder / "run"), load_meta(folder / "run")
    data = prepare(config.data)
    ids = data.splits["valid"].ids[:200]
    search = open_search(config, meta["vocab"], folder / "run")
    near = Neighbours(neighbour_tokens(search.keys, search.store, ids, 3))
    given = evaluate(lm, ids, block=32, neighbours=near)
    with with_neighbours(lm, meta, str(folder / "run")):
        found = evaluate(lm, ids, block=32)
        parts = torch.cat([torch.from_numpy(s.nats) for s in score(lm, [ids.astype(np.int64)], chunk=48)])
        x = torch.from_numpy(ids.astype(np.int64))[None]
        whole = lm(x[:, :-1]).logits
        cache = lm.cache(1, slack=8)
        steps = [lm.decode(part, cache) for part in (x[:, :70], x[:, 70:71], x[:, 71:80])]
        cache.crop(torch.tensor([75]))
        steps[2] = steps[2][:, :4]
        steps += [lm.decode(x[:, 75:-1], cache.fork(2)) for x in (x.expand(2, -1),)]
    assert found.nats == pytest.approx(given.nats, rel=1e-6)
    assert float(parts.sum()) == pytest.approx(given.nats, rel=1e-6)
    torch.testing.assert_close(torch.cat([s[:1] for s in steps], 1), whole, rtol=1e-4, atol=1e-4)
    plain = lm.gate
    lm.gate = None
    assert evaluate(lm, ids, block=32).nats != pytest.approx(given.nats, rel=1e-6)
    lm.gate = plain


def test_it_generates_what_all_text_predicts(folder: Path) -> None:
    lm, meta = load(folder / "run"), load_meta(folder / "run")
    prompt = prepare(spalm(folder).data).splits["valid"].ids[:60].astype(np.int64)
    with with_neighbours(lm, meta, str(folder / "run")):
        made = [int(piece.id) for piece in generate(lm, prompt, max_tokens=6, sampling=Sampling(0.0))]
        text = prompt.tolist()
        for token in made:
            assert int(lm(torch.tensor([text])).logits[0, -1].argmax()) == token
            text.append(token)
    assert len(made) == 6


def test_a_training_text_does_not_find_itself(folder: Path) -> None:
    """A datastore that knows the answers, and yet no neighbour's token is one more often than by chance."""
    ids = prepare(spalm(folder).data).splits["train"].ids
    near = read_neighbours(folder / "run", "train", len(ids), 3).tokens
    config = with_vocab(spalm(folder), prepare(spalm(folder).data))
    keys = frozen_keys(config, prepare(config.data).vocab.to_json())
    store = Store(folder / "run/datastore")
    itself = neighbour_tokens(keys, store, np.append(ids, 0), 1, window=0, copy=0)[:-1]  # as another text
    assert (itself[:, 0] == ids[1:]).mean() > 0.95 > 0.75 > (near[:, 0] == ids[1:]).mean()


REFUSED = {
    "no frozen model": (
        {"retrieve.model": ""},
        "model.neighbours is 3 and retrieve.model is ''; expected both or none",
    ),
    "no neighbours": ({"model.neighbours": 0}, "model.neighbours is 0 and retrieve.model is '.*frozen'; expected both"),
    "no tied embedding": ({"model.embedding.tied": False}, "expected a language model with embedding.tied"),
    "an encoder": ({"model.kind": "encoder"}, "model.neighbours is 3, and their embeddings are mixed into the state"),
    "a task": ({"data.source": "recall"}, "model.neighbours is 3 and data.source is 'recall'; expected a stream"),
    "window": ({"retrieve.window": -1}, "retrieve.window is -1; expected 0 or more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings_are_refused(tmp_path: Path, name: str) -> None:
    changes, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        tiny(tmp_path, MODEL | {"retrieve.model": str(tmp_path / "frozen")} | changes)


def test_a_changed_run_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"train.bin was found with another window than this run has; change it back"):
        train(spalm(folder, retrieve__window=5, resume=True))
    with pytest.raises(ValueError, match=r"which was trained on other tokens than .* has; expected a model with the"):
        train(spalm(folder, "chars", data__tokens="char"))
    path = folder / "run/neighbours/valid.bin"
    kept = path.read_bytes()
    try:
        path.write_bytes(kept[:-4] + b"\7\0\0\0")
        with pytest.raises(ValueError, match=r"valid.bin does not fit its checksum: it is damaged; remove"):
            train(spalm(folder, resume=True))
        path.write_bytes(kept[:-4])
        with pytest.raises(ValueError, match=r"valid.bin has \d[\d,]* bytes; expected"):
            read_neighbours(folder / "run", "valid", len(kept) // 12 + 1, 3)
    finally:
        path.write_bytes(kept)


def test_a_validation_text_in_the_datastore_is_refused(folder: Path, tmp_path: Path) -> None:
    from spanformer.retrieve.build import Plan, build_store

    config = spalm(folder, "again", retrieve__store=str(tmp_path / "store"))
    data = prepare(config.data)
    keys = frozen_keys(config, data.vocab.to_json())
    for name in ("train", "valid"):
        build_store(keys, data.splits[name].ids, tmp_path / "store", Plan("int8"))
    with pytest.raises(ValueError, match=r"of the valid split is in the datastore .*, where it would find itself"):
        train(config)


def test_without_a_frozen_model_nothing_is_predicted(folder: Path) -> None:
    lm = load(folder / "run")
    x = torch.zeros(1, 4, dtype=torch.int64)
    for call in (lambda: lm(x), lambda: lm.cache(1)):
        with pytest.raises(ValueError, match=r"mixes in 3 neighbours of each token, and nothing finds them; pass"):
            call()
    with pytest.raises(ValueError, match=r"neighbours are given, and model.neighbours is 0; expected none"):
        load(folder / "frozen")(x, neighbours=torch.zeros(1, 4, 3, dtype=torch.int64))
    meta = load_meta(folder / "run")
    with with_neighbours(lm, meta, str(folder / "run")), pytest.raises(ValueError, match="cannot be saved; decode"):
        lm.cache(1).save(folder / "cache")
    about = json.loads((folder / "run/neighbours/train.json").read_text())
    assert about["k"] == 3 and about["window"] == 4


def test_a_frozen_model_that_was_trained_further_is_refused(folder: Path) -> None:
    other = folder / "other"
    other.mkdir(exist_ok=True)
    write_text(other / "text.txt")
    train(spalm(folder, "moving", train__steps=1))
    train(tiny(folder, TIED | {"out": str(folder / "frozen"), "train.steps": 22, "resume": True}))
    with pytest.raises(ValueError, match=r"was built by a model .*frozen.* with another set of weights"):
        train(spalm(folder, "moving", resume=True))
