"""Ids, rows and slots of a checkpoint: those of a table with a vocabulary."""

import numpy as np
import pytest
import tensorflow as tf

from tests.embeddings.test_dynamic import (
    VOCABULARY,
    data,
    dynamic,
    full,
    model_of,
    rows_of,
    save,
    trained,
    words,
)
from tfdist.checkpoint import load_rows, load_variable
from tfdist.embeddings.index import NO_ID, mixed, unmixed

SLOTS = {
    "sgd": set(),
    "adagrad": {"accumulator"},
    "adam ema": {"momentum", "velocity", "average"},
    "accumulates": {"accumulator", "gradient_accumulator"},
}


def hashes(ids):
    """Of all 64 bits, half of them negative."""
    return ids * np.int64(0x1E3779B97F4A7C15) - 7


def fingerprints(ids):
    return tf.bitcast(tf.fingerprint(words(ids)), tf.int64).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "of", "num_shards"),
    [("adagrad", words, 1), *((name, hashes, 3) for name in SLOTS)],
)
def test_a_history(tmp_path, optimizer, of, num_shards):
    """Each id's row and slots are what Keras' rule made of its gradients."""
    strings = of is words
    dtype = "string" if strings else "int64"
    model = model_of(dynamic(num_shards), optimizer, dtype)
    other = full(model.get_layer("table"), optimizer, of)
    trained(model, data(5, of=of), 5)
    path = save(model, tmp_path / "growing")
    ids, rows, slots = load_rows(path, "table")
    trained(other, data(5), 5)
    path = save(other, tmp_path / "full")

    seen = np.unique([x for x, _ in data(5)])
    number = dict(
        zip((fingerprints if strings else hashes)(seen), seen, strict=True)
    )
    assert ids.dtype == "int64"
    assert sorted(ids) == sorted(number)
    at = [number[key] for key in ids]
    assert len(at) == VOCABULARY - np.sum(~np.isin(range(VOCABULARY), seen))
    assert {*slots} == SLOTS[optimizer]
    name = "table/embeddings"
    wanted = {"": load_variable(path, name)}
    for slot in slots:
        key = f"{name}/{other.optimizer.name}/{slot}"
        wanted[slot] = load_variable(path, key)
    for slot, found in {"": rows, **slots}.items():
        largest = np.abs(wanted[slot]).max()
        assert slot == "gradient_accumulator" or np.ptp(found) > 1e-4 * largest
        np.testing.assert_allclose(
            found, wanted[slot][at], rtol=1e-5, atol=1e-5 * largest
        )


@pytest.mark.slow
def test_ids_without_a_row_are_not_there(tmp_path):
    """Neither those to be admitted, nor those that lost theirs."""
    table = dynamic(2, admit_after=2, evict_after_steps=3)
    model = trained(model_of(table), data(3, 20_000), 3)
    ids, rows, _ = load_rows(save(model, tmp_path), "table")
    came = np.unique([x for x, _ in data(3, 20_000)])
    assert 0 < len(ids) == table.num_ids() < len(came)
    assert {*ids} < {*came}
    np.testing.assert_array_equal(rows, rows_of(table, ids))


def test_a_table_that_has_learned_nothing(tmp_path):
    model = model_of(dynamic(2), "adam")
    model.optimizer.build(model.trainable_variables)
    path = save(model, tmp_path)
    ids, rows, slots = load_rows(path, "table")
    assert ids.shape == (0,)
    assert [*slots] == ["momentum", "velocity"]
    assert {each.shape for each in (rows, *slots.values())} == {(0, 4)}
    message = r"has the growing tables \['table'\]. Received: \['tables'\]"
    with pytest.raises(ValueError, match=message):
        load_rows(path, "tables")


def test_keys_tell_their_ids():
    ids = np.random.default_rng(0).integers(NO_ID, 2**63 - 1, 100_000)
    ids = np.array([*ids, NO_ID, -1, 0, 1, 2**63 - 1])
    np.testing.assert_array_equal(unmixed(mixed(tf.constant(ids)).numpy()), ids)
