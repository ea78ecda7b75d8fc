import json

import keras
import pytest
import table_checks
import tensorflow as tf

from tfdist.placement.scope import placed_scope
from tfdist.placement.strategies import byte_size_load_fn
from tfdist.placement.variables import describe

PLACEMENTS = ["greedy", "planned", "random"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What was built on 2 ps under each placement."""
    directory = tmp_path_factory.mktemp("placed")
    table_checks.launched("placed", directory, ps=2)
    return json.loads((directory / "placed.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACEMENTS)
def test_each_variable_is_where_the_strategy_said(name, found):
    said, tasks = found[name]["said"], found[name]["tasks"]
    model = table_checks.table_model()
    paths = [v.path for v in model.variables if "seed" not in v.path]
    assert {path for path, *_ in said} >= set(paths)
    for path, task, _ in said:
        if path in paths:
            assert tasks[path] in (task, [task])


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACEMENTS)
def test_slots_are_beside_their_variable(name, found):
    tasks = found[name]["tasks"]
    slots = [n for n in tasks if "/adam/" in n]
    assert len(slots) == 2 * 9
    for slot in slots:
        assert tasks[slot] == tasks[slot.split("/adam/")[0]]


@pytest.mark.slow
def test_strategies_are_told_full_names_and_slots(found):
    specs = {spec.name: spec for spec in describe(table_checks.table_model)}
    said = found["greedy"]["said"]
    assert specs.keys() <= {path for path, *_ in said}
    loads = [0, 0]
    for path, task, size in said:
        assert task == loads.index(min(loads)), path
        loads[task] += size
        if path in specs:
            assert size == byte_size_load_fn(specs[path])
            assert specs[path].num_slots == (0 if "moving" in path else 2)


@pytest.mark.slow
def test_placements_use_both_servers_and_differ(found):
    said = [
        {path: task for path, task, _ in found[name]["said"]}
        for name in PLACEMENTS
    ]
    assert all(set(each.values()) == {0, 1} for each in said)
    assert said[0] != said[1] != said[2]


def test_a_task_that_does_not_exist():
    scope = placed_scope(
        tf.distribute.get_strategy(), num_ps=2, placement=lambda spec: 2
    )
    with (
        pytest.raises(ValueError, match=r"Received: 2 for variable 'v'"),
        scope,
    ):
        tf.Variable(1.0, name="v")


def test_specs_of_variables_that_were_not_made():
    specs = describe(table_checks.table_model)
    scope = placed_scope(tf.distribute.get_strategy(), num_ps=1, specs=specs)
    with (
        pytest.raises(ValueError, match=r"the same variables each time"),
        scope,
    ):
        pass


def test_metrics_of_replicas_are_read_where_they_are():
    """Else a process that reads one waits for all others."""
    strategy, found = tf.distribute.MirroredStrategy(["CPU:0"]), []
    for scope in (strategy.scope(), placed_scope(strategy)):
        with scope:
            total = keras.metrics.Mean().total.value
        found.append(total.synchronization)
    on_read = tf.VariableSynchronization.ON_READ
    assert found[0] == on_read != found[1]
