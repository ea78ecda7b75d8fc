import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.embeddings import index as module
from tfdist.embeddings.index import (
    BUCKET,
    EMPTY,
    MOST_ROWS,
    NO_ID,
    SEGMENT,
    Index,
    _buckets,
    find,
    insert,
    mixed,
    segments,
    still_held,
)
from tfdist.embeddings.places import Places, places_of

ONE = Places()


def made(num_segments=1, first=0, own=None):
    shape = [(own or num_segments) * SEGMENT // BUCKET, BUCKET]
    keys = keras.Variable(np.zeros(shape), dtype="int64")
    return Index([keys], [first], [num_segments])


def key(ids):
    return mixed(tf.constant(ids, tf.int64))


def nothing(slots, places, which, lost):
    return []


def held(index):
    """The keys in the table, by slot."""
    keys = index.keys[0].numpy().ravel()
    return {slot: keys[slot] for slot in np.flatnonzero(keys)}


def reference(ids):
    """MurmurHash3's finalizer, in Python."""
    mask = (1 << 64) - 1
    found = []
    for x in ids:
        x = (x ^ NO_ID) & mask
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = (x ^ (x >> 33)) * factor & mask
        x ^= x >> 33
        found.append(x - (1 << 64) if x >> 63 else x)
    return found


def test_mixed_is_the_bijection_of_murmurhash():
    ids = [0, 1, -1, 2**62, 2**63 - 1, NO_ID, NO_ID + 1, 1234567890123]
    assert key(ids).numpy().tolist() == reference(ids)
    assert key([NO_ID]).numpy() == [EMPTY]
    many = np.concatenate([np.arange(-50_000, 50_000), np.arange(50) << 55])
    assert len(np.unique(key(np.unique(many)))) == len(np.unique(many))


@pytest.mark.parametrize("num", [1, 3, 1000])
def test_segments_are_even(num):
    found = segments(key(np.arange(200 * num)), num).numpy()
    counts = np.bincount(found, minlength=num)
    assert counts.size == num
    # Six standard deviations of a Poisson distribution.
    assert np.all(np.abs(counts - 200) <= (6 * 200**0.5 if num > 1 else 0))


def test_the_largest_table_has_a_place_for_every_key():
    num = MOST_ROWS // SEGMENT
    buckets = _buckets(Index([], [0], [num]), key(np.arange(10_000)), ONE)
    each = num * SEGMENT // BUCKET
    assert 0 <= buckets.numpy().min() < each // 1000
    assert each - each // 1000 < buckets.numpy().max() < each


def test_what_was_inserted_is_found_where_it_is():
    index, keys = made(2), key(np.arange(1000))
    assert np.all(find(index, keys, ONE).numpy() == -1)
    slots = insert(index, keys, ONE, nothing).numpy()
    assert held(index) == dict(zip(slots, keys.numpy(), strict=True))
    np.testing.assert_array_equal(find(index, keys, ONE), slots)
    np.testing.assert_array_equal(insert(index, keys, ONE, nothing), slots)
    assert np.all(find(index, key(np.arange(1000, 2000)), ONE).numpy() == -1)


def test_what_was_found_is_looked_at_again():
    """Of keys that another has by now, or that had no slot, none is held."""
    index, keys = made(2), key(np.arange(100))
    slots = insert(index, keys, ONE, nothing)
    np.testing.assert_array_equal(still_held(index, keys, slots, ONE), slots)
    swapped = tf.concat([slots[1:2], slots[:1], slots[2:]], axis=0)
    held_now = still_held(index, keys, swapped, ONE).numpy()
    assert held_now[:2].tolist() == [-1, -1]
    np.testing.assert_array_equal(held_now[2:], slots[2:])
    missing = tf.fill([100], tf.constant(-1, tf.int64))
    assert np.all(still_held(index, keys, missing, ONE).numpy() == -1)


def test_the_slot_does_not_depend_on_shards():
    whole, keys = made(3), key(np.arange(5000))
    slots = insert(whole, keys, ONE, nothing)
    of = segments(keys, 3)
    for first, own in ((0, 1), (1, 2)):
        part = made(3, first, own)
        mine = (of >= first) & (of < first + own)
        found = insert(part, keys[mine], ONE, nothing)
        np.testing.assert_array_equal(found + first * SEGMENT, slots[mine])


def test_shards_that_are_searched_together():
    """Of two tables that have the same ids: as each by itself."""
    parts, keys = [(0, 1, 3), (1, 2, 3), (0, 2, 2)], key(np.arange(9000))
    alone = [made(whole, first, own) for first, own, whole in parts]
    joined = [made(whole, first, own) for first, own, whole in parts]
    joined = Index(
        [index.keys[0] for index in joined],
        [first for first, _, _ in parts],
        [whole for _, _, whole in parts],
    )
    wanted = []
    for first, own, whole in parts:
        of = segments(keys, whole)
        wanted.append(keys[(of >= first) & (of < first + own)])
    counts = [len(each) for each in wanted]
    places, every = places_of(tf.constant(counts), 3), tf.concat(wanted, 0)
    assert np.all(find(joined, every, places).numpy() == -1)
    slots = insert(joined, every, places, nothing)
    assert 0 < np.count_nonzero(slots == -1) < 2000
    np.testing.assert_array_equal(find(joined, every, places), slots)
    held = still_held(joined, every, slots, places)
    np.testing.assert_array_equal(held, slots)
    for own, index, keys, both in zip(
        wanted, alone, joined.keys, tf.split(slots, counts), strict=True
    ):
        np.testing.assert_array_equal(insert(index, own, ONE, nothing), both)
        np.testing.assert_array_equal(index.keys[0], keys)


def test_a_key_is_published_when_its_row_is_ready():
    index, keys = made(), key(np.arange(100))
    seen = []

    def begin(slots, places, which, lost):
        seen.extend(find(index, tf.gather(keys, which), ONE).numpy())
        return []

    insert(index, keys, ONE, begin)
    assert len(seen) == 100
    assert set(seen) == {-1}


def test_an_insert_that_fails_publishes_nothing_and_lets_others_go_on():
    index, keys = made(), key([5])

    @tf.function
    def fails():
        return insert(
            *(index, keys, ONE),
            lambda *_: [tf.debugging.Assert(False, ["It fails."])],
        )

    with pytest.raises(tf.errors.InvalidArgumentError, match="It fails"):
        fails()
    assert held(index) == {}
    assert insert(index, keys, ONE, nothing) >= 0


@pytest.mark.parametrize("batch", [64, 2048])
def test_no_id_is_refused_at_three_quarters(batch):
    index = made(4)
    number = 4 * SEGMENT * 3 // 4
    function = tf.function(lambda ids: insert(index, mixed(ids), ONE, nothing))
    for start in range(0, number, batch):
        slots = function(tf.range(start, start + batch, dtype=tf.int64))
        assert np.all(slots.numpy() >= 0)
    assert len(held(index)) == number


def test_a_full_table_refuses():
    index, keys = made(), key(np.arange(2 * SEGMENT))
    slots = insert(index, keys, ONE, nothing).numpy()
    assert (slots >= 0).sum() == len(held(index)) > 0.97 * SEGMENT
    assert len(np.unique(slots[slots >= 0])) == len(held(index))
    np.testing.assert_array_equal(find(index, keys, ONE), slots)
    # Also if there is nothing to do, or nobody to do it for.
    np.testing.assert_array_equal(insert(index, keys, ONE, nothing), slots)
    assert insert(index, keys[:0], ONE, nothing).shape == [0]


def stress(num_threads=4, steps=40, batch=300):
    """Threads that insert the same new ids; how many slots, how many ids."""
    index = made(8)
    rows = tf.Variable(tf.zeros([8 * SEGMENT], tf.int64))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(ids):
        def begin(slots, places, which, lost):
            return [
                tf.raw_ops.ResourceScatterUpdate(
                    resource=rows.handle,
                    indices=slots,
                    updates=tf.gather(mixed(ids), which),
                )
            ]

        slots = insert(index, mixed(ids), ONE, begin)
        # Who finds a key finds its row.
        return tf.reduce_all(tf.gather(rows, slots) == mixed(ids))

    batches = [
        np.unique(np.random.default_rng(i).integers(0, 20_000, batch))
        for i in range(steps)
    ]
    step(batches[0])
    meeting, good = threading.Barrier(num_threads), []

    def work():
        for ids in batches:
            meeting.wait()
            good.append(bool(step(ids)))

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(good) == num_threads * steps
    found = held(index)
    return len(found), len(np.unique(np.concatenate(batches))), found, all(good)


def test_threads_make_a_slot_for_each_id():
    slots, ids, found, rows_are_ready = stress()
    assert rows_are_ready
    assert slots == ids
    assert len(set(found.values())) == ids


def test_without_the_mutex_they_make_more(monkeypatch):
    """So the test above would see it."""
    monkeypatch.setattr(module, "locked", lambda name, run: run())
    for _ in range(30):
        slots, ids, _, rows_are_ready = stress()
        if slots != ids or not rows_are_ready:
            return
    pytest.fail("Threads never met.")
