"""Which ids get a row, and which lose it, against a table in Python."""

import functools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pace import slow
from test_dynamic import OPTIMIZERS, dynamic, model_of, trained

from tfdist import PartitionedEmbedding
from tfdist.embeddings import admission, growing
from tfdist.embeddings.growing import (
    Found,
    GrowingShards,
    growing_of,
    serialized_updates,
)
from tfdist.embeddings.index import BUCKET, SEGMENT, Index, _buckets, mixed
from tfdist.embeddings.places import Places
from tfdist.training import slots

ROOM, FIRST = 2 * BUCKET, 0.5


@functools.cache
def crowded(number=60):
    """Keys that all have the same two buckets, of a table of one segment."""
    keys = mixed(tf.range(1_500_000, dtype=tf.int64))
    pairs = _buckets(Index([], [0], [1]), keys, Places()).numpy()
    pairs = np.sort(pairs, axis=1)
    mine = np.flatnonzero((pairs == pairs[0]).all(axis=1))[:number]
    assert len(mine) == number
    return keys.numpy()[mine]


class Shard:
    """A table of one segment, each update of which adds 1 to row and slot."""

    def __init__(self, **kwargs):
        self.table = dynamic(output_dim=2, **kwargs)
        self.table.build()
        self.own = growing_of(self.table.shards[0])
        self.slot = keras.Variable(np.full([SEGMENT, 2], FIRST, "float32"))
        ids = tf.TensorSpec([None], tf.int64)
        step = tf.TensorSpec([], tf.int64)
        self.found = GrowingShards(self.table.shards)
        self.pull = tf.function(self._pull, [ids])
        rows = tf.TensorSpec([None, 2], tf.float32)
        self.push = tf.function(self._push, [ids, ids, rows, step])

    def _pull(self, keys):
        found = self.found.rows(Found(keys, Places()))
        return found.keys, found.slots, found.rows

    def _push(self, keys, at, rows, step):
        gradient = tf.gather(self.table.first_rows(keys), [0, 1], axis=1)

        def update():
            found = Found(keys, Places(), at, rows, tf.reduce_all(at >= 0))
            ((slots, own),) = self.found.claimed(
                found, gradient, step, [[(self.slot, FIRST)]]
            )
            self.own.shard.value.scatter_add(tf.IndexedSlices(own, slots))
            ones = tf.ones_like(own)
            self.slot.value.scatter_add(tf.IndexedSlices(ones, slots))

        serialized_updates([self.own.shard], update, [gradient])

    def learn(self, keys, step):
        found = self.pull(tf.constant(keys, tf.int64))
        self.push(*found, tf.constant(step, tf.int64))

    def held(self):
        """Slot of each key that has one."""
        keys = self.own.keys.numpy().ravel()
        return {keys[slot]: slot for slot in np.flatnonzero(keys)}

    def check(self):
        """Every row is what the updates of its own id give, since it began."""
        slots = self.held()
        at, keys = [*slots.values()], tf.constant([*slots], tf.int64)
        times = self.slot.numpy()[at][:, :1] - FIRST
        wanted = self.table.first_rows(keys).numpy() * (1 + times)
        found = self.own.shard.numpy()[at]
        np.testing.assert_allclose(found, wanted, rtol=1e-4)
        return dict(zip(slots, times[:, 0].astype(int), strict=True))


class Model:
    """What a `Shard` of `crowded` holds: two buckets, for all of them."""

    def __init__(self, admit_after, evict_after):
        self.admit_after = admit_after
        self.evict_after = evict_after or 1_000_000
        self.seen, self.times, self.count = {}, {}, {}
        self.counters = dict.fromkeys(growing.COUNTED, 0)

    def update(self, keys, now, held):
        """Which of equals have come first, or gone, the table says: `held`."""
        self.seen |= {k: max(now, self.seen[k]) for k in keys if k in self.seen}
        new = [k for k in keys if k not in self.seen]
        self.count |= {k: self.count.get(k, 0) + 1 for k in new}
        admitted = {k for k in new if self.count[k] >= self.admit_after}
        free = ROOM - len(self.seen)
        oldest = sorted(
            at for at in self.seen.values() if now - at >= self.evict_after
        )
        begun, lost = admitted & held, {*self.seen} - held
        assert len(begun) == min(len(admitted), free + len(oldest))
        number = max(0, len(begun) - free)
        assert sorted(self.seen.pop(k) for k in lost) == oldest[:number]
        self.seen |= dict.fromkeys(begun, now)
        self.times |= dict.fromkeys({*begun, *lost}, 0)
        self.times |= {k: self.times[k] + 1 for k in keys if k in self.seen}
        for what, some in (
            ("refused", admitted - begun),
            ("not_admitted", {*new} - admitted),
            ("evicted_ids", lost),
        ):
            self.counters[what] += len(some)


@pytest.mark.parametrize(
    ("admit_after", "evict_after"),
    [*slow((1, None), (3, None), (1, 3)), (2, 5)],
)
@given(data=st.data())
@settings(max_examples=4, deadline=None, phases=[Phase.generate])
def test_a_table_in_python(admit_after, evict_after, data):
    """Whatever lies between a pull and its push."""
    shard = Shard(admit_after=admit_after, evict_after_steps=evict_after)
    model, waiting = Model(admit_after, evict_after), []
    every = st.lists(
        st.sampled_from(crowded()), min_size=1, max_size=25, unique=True
    )
    batches = st.lists(
        st.tuples(every, st.integers(0, 3)), min_size=10, max_size=30
    )
    for step, (keys, delay) in enumerate(data.draw(batches)):
        found = shard.pull(tf.constant(keys, tf.int64))
        first = shard.table.first_rows(found[0]).numpy()
        times = np.array([model.times.get(k, 0) for k in keys])
        np.testing.assert_allclose(
            found[2], first * (1 + times[:, None]), rtol=1e-4
        )
        waiting.append((step + delay, step, found))
        for each in [w for w in waiting if w[0] <= step]:
            waiting.remove(each)
            _, at, found = each
            shard.push(*found, tf.constant(at, tf.int64))
            held = shard.held()
            model.update(found[0].numpy().tolist(), at + 1, {*held})
            assert {*held} == {*model.seen}
            if evict_after:
                seen = shard.own.seen.numpy()
                assert {k: seen[at] for k, at in held.items()} == model.seen
        assert shard.check() == {k: model.times[k] for k in model.seen}
    counters = shard.table.counters()
    assert {what: counters[what] for what in growing.COUNTED} == model.counters
    assert counters["num_ids"] == len(model.seen)


def test_the_oldest_lose_their_rows_and_only_for_want_of_room():
    shard = Shard(evict_after_steps=10)
    for step in range(ROOM):
        shard.learn(crowded()[step : step + 1], step)
    shard.learn(crowded()[ROOM:], ROOM)
    lost = ROOM - 10 + 1
    wanted = {*crowded()[lost:ROOM], *crowded()[ROOM : ROOM + lost]}
    assert {*shard.held()} == wanted
    assert shard.table.counters()["evicted_ids"] == lost
    shard.check()


@pytest.mark.parametrize("begin", [2**31 - 7, *slow(2**32 - 7)])
def test_what_is_in_use_keeps_its_row_however_many_steps_there_were(begin):
    """Also where their number passes what the table's 32 bits hold."""
    shard = Shard(evict_after_steps=3)
    old, used, new = np.split(crowded(), [20, ROOM])
    shard.learn(old, begin)
    for step in range(1, 15):
        shard.learn(used, begin + step)
    shard.learn(used, begin + 10)  # A late worker's.
    shard.learn(new, begin + 16)
    assert {*used} < {*shard.held()} < {*used, *new}
    assert shard.table.counters()["evicted_ids"] == len(old) < len(new)


def test_what_was_seen_ages_ago_goes_after_what_is_free():
    shard = Shard(evict_after_steps=1)
    shard.learn(crowded()[: ROOM - 1], 0)
    shard.learn(crowded()[ROOM - 1 : ROOM], 2**31 - 10)
    assert {*shard.held()} == {*crowded()[:ROOM]}
    shard.learn(crowded()[ROOM:], 2**31 + 10)
    assert {*crowded()[ROOM:]} < {*shard.held()}


@pytest.mark.slow
def test_threads_never_update_the_row_of_another():
    _stress(80)


@pytest.mark.slow
def test_without_taking_turns_they_do(monkeypatch):
    """So the test above would see it."""
    monkeypatch.setattr(growing, "locked", lambda _, run, needed: run())
    for _ in range(20):
        try:
            _stress(50)
        except AssertionError:
            return
    pytest.fail("Threads never met.")


def _stress(steps, num_threads=4):
    """Threads whose ids take each other's slots all the time."""
    shard, failed = Shard(evict_after_steps=1), []

    def work(seed):
        rng = np.random.default_rng(seed)
        # Some workers are late.
        for step in range(3 * seed, steps + 3 * seed):
            try:
                shard.learn(rng.choice(crowded(), 20, replace=False), step)
            except tf.errors.OpError as error:
                failed.append(error)

    threads = [
        threading.Thread(target=work, args=[i]) for i in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert shard.table.counters()["evicted_ids"] > steps
    shard.check()


# --- Counting ----------------------------------------------------------------


@given(
    st.lists(
        st.lists(st.integers(0, 300), min_size=1, unique=True), max_size=20
    ),
    st.integers(1, 3),
)
@settings(max_examples=20, deadline=None, phases=[Phase.generate])
def test_no_id_counts_as_seen_less_often_than_it_was(batches, num_segments):
    shape = [num_segments, admission.WIDTH]
    sketch, times = keras.Variable(np.zeros(shape), dtype="int32"), {}
    for ids in batches:
        segment = tf.constant(np.array(ids) % num_segments)
        keys = mixed(tf.constant(ids, tf.int64))
        found = admission.seen_again([sketch], segment, keys, Places()).numpy()
        for key, count in zip(ids, found, strict=True):
            times[key] = times.get(key, 0) + 1
            assert count >= times[key]


def test_counts_end_at_127_and_halve():
    sketch = keras.Variable(np.zeros([2, admission.WIDTH]), dtype="int32")
    one, key = tf.constant([1], tf.int64), mixed(tf.constant([5], tf.int64))
    for _ in range(130):
        times = admission.seen_again([sketch], one, key, Places())
    assert times.numpy() == [127]
    admission.age([sketch], one, Places())
    assert admission.seen_again([sketch], one, key, Places()).numpy() == [64]
    assert np.count_nonzero(sketch.numpy()) == 3
    assert not sketch.numpy()[0].any()


def test_counts_beside_each_other_stay_apart():
    """Four are one number."""
    sketch = keras.Variable(np.zeros([1, admission.WIDTH]), dtype="int32")
    lane = np.arange(4)
    # Whose other places are elsewhere.
    keys = lane * admission.WIDTH + (100 + lane << 13) + (200 + lane << 26)
    wanted = np.array([127, 3, 126, 120], np.uint8)
    for i in range(127):
        some = tf.constant(keys[wanted > i])
        admission.seen_again([sketch], tf.zeros_like(some), some, Places())
    assert sketch.numpy()[0, :1].view(np.uint8).tolist() == wanted.tolist()
    admission.age([sketch], tf.constant([0], tf.int64), Places())
    halves = (wanted // 2).tolist()
    assert sketch.numpy()[0, :1].view(np.uint8).tolist() == halves


def test_ids_that_came_once_long_ago_do_not_fill_the_sketch():
    """Of a million, hardly one more is admitted at its first sight."""
    shard = Shard(admit_after=2)
    batch, number = 1024, 100
    for step in range(number):
        first = step * batch
        shard.learn(mixed(tf.range(first, first + batch, dtype=tf.int64)), step)
    admitted = batch * number - shard.table.counters()["not_admitted"]
    assert admitted < 0.08 * batch * number


def test_ids_that_come_back_do_not_fill_the_sketch():
    """Whose sights count as others' do: new ones are still told apart."""
    shard = Shard(admit_after=2, evict_after_steps=1)
    batch, number = 128, 200
    for step in range(4 * number):
        first = step // 2 % number * batch  # Twice, and twice again.
        shard.learn(mixed(tf.range(first, first + batch, dtype=tf.int64)), step)
    assert shard.table.counters()["evicted_ids"] > number * batch
    before = shard.table.counters()["not_admitted"]
    for step in range(4 * number, 4 * number + 4):
        first = step * batch
        shard.learn(mixed(tf.range(first, first + batch, dtype=tf.int64)), step)
    admitted = 4 * batch - (shard.table.counters()["not_admitted"] - before)
    print("admitted at once", admitted / (4 * batch))
    assert admitted < 0.15 * 4 * batch


# --- In training -------------------------------------------------------------

WINDOW, DRIFT, DRIFTING = 1500, 40, 150


def drifting():
    """Ids of a window that moves on; what is behind it never comes back."""
    rng = np.random.default_rng(0)
    first = DRIFT * np.arange(DRIFTING)[:, None, None]
    ids = first + rng.integers(0, WINDOW, [DRIFTING, 128, 3])
    y = (ids[:, :, :1] % 2).astype("float32")
    return tf.data.Dataset.from_tensor_slices((ids, y))


def both(optimizer, **kwargs):
    """A model with a table that recycles, and one with rows for all."""
    number = DRIFT * DRIFTING + WINDOW
    start = "zeros" if optimizer == "ftrl" else "uniform"
    table = dynamic(embeddings_initializer=start, **kwargs)
    model = model_of(table, optimizer)
    reference = PartitionedEmbedding(number, 4, name="table")
    other = model_of(reference, optimizer)
    reference.set_weights([table.initial_rows(np.arange(number)).numpy()])
    return model, other


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "ftrl"])
def test_who_takes_over_a_row_begins_anew(optimizer, monkeypatch):
    """Row and slots are what they are where each id ever seen has its own."""
    monkeypatch.setitem(OPTIMIZERS, "ftrl", lambda: keras.optimizers.Ftrl(0.1))
    model, other = both(optimizer, evict_after_steps=40)
    for each in (model, other):
        trained(each, drifting(), DRIFTING)
    table = model.get_layer("table")
    counters = table.counters()
    assert counters["evicted_ids"] > 500
    assert counters["refused"] == counters["not_admitted"] == 0
    live = np.unique([x for x, _ in drifting().skip(DRIFTING - 40)])
    keys = mixed(tf.constant(live, tf.int64))
    shards = GrowingShards(table.shards)
    at = shards.rows(Found(keys, Places())).slots.numpy()
    assert np.mean(at >= 0) >= 0.99
    at, live = at[at >= 0], live[at >= 0]
    mine, theirs = (
        [shard, *slots.named_slots(each.optimizer, shard).values()]
        for each in (model, other)
        for shard in each.get_layer("table").shards
    )
    for found, wanted in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(
            found.numpy()[at], wanted.numpy()[live], rtol=1e-3, atol=1e-6
        )


VOCABULARY, SEEDS, STEPS, BATCH = 100_000, 5, 200, 512


@functools.cache
def zipfian(seed):
    """Examples of 8 ids by Zipf's law, each of which weighs for the label."""
    rng = np.random.default_rng(seed)
    share = np.arange(1.0, VOCABULARY + 1) ** -1.2
    size = STEPS * BATCH + 20_000
    ids = rng.choice(VOCABULARY, [size, 8], p=share / share.sum())
    weight = rng.normal(size=VOCABULARY)
    odds = weight[ids].sum(axis=1, keepdims=True) * 0.5
    y = rng.random([size, 1]) < 1 / (1 + np.exp(-odds))
    return ids, y.astype("float32")


def learned(table, seed):
    """Area under the curve on examples that were not trained on."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input([8], dtype="int64")
    output = keras.layers.Dense(1, "sigmoid")(table(inputs))
    model = keras.Model(inputs, output)
    model.compile(keras.optimizers.Adagrad(0.1), "binary_crossentropy")
    ids, y = zipfian(seed)
    first = STEPS * BATCH
    batches = [np.split(each[:first], STEPS) for each in (ids, y)]
    train = tf.data.Dataset.from_tensor_slices(tuple(map(np.stack, batches)))
    trained(model, train, STEPS)
    area = keras.metrics.AUC(1000)
    area.update_state(y[first:], model.predict(ids[first:], 2000, verbose=0))
    return float(area.result())


@pytest.mark.slow
@pytest.mark.soak
def test_ids_that_are_rare_need_no_row():
    """Zipf's law: as good as a full vocabulary, with far fewer rows."""
    sizes, areas = [], []
    for seed in range(SEEDS):
        tables = [
            dynamic(4, 140_000, output_dim=8, combiner="sum", admit_after=n)
            for n in (1, 3)
        ]
        full = PartitionedEmbedding(VOCABULARY, 8, combiner="sum")
        areas.append([learned(table, seed) for table in (full, *tables)])
        sizes.append([table.num_ids() for table in tables])
    every, often = np.mean(sizes, axis=0)
    print("areas", np.round(areas, 4).tolist(), "sizes", every, often)
    assert often <= 0.4 * every
    full, *others = np.mean(areas, axis=0)
    error = np.std(areas, axis=0, ddof=1)[0] / SEEDS**0.5
    assert full > 0.7
    assert np.all(np.array(others) > full - 2 * error)
