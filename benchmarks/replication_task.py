"""Runs one task of `benchmarks.replication`.

    python -m benchmarks.replication_task JSON

Workers and ps serve; the chief measures. For between-graph replication, the
chief also starts a client per worker: a process of this program that receives
its `index` in JSON, reads requests from standard input and writes the answers
to standard output, one per line. Clients use only the parameter servers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from benchmarks import ps_task
from benchmarks.replication import SCENARIOS
from tfdist._tf.private import UninitializedVariable
from tfdist.cluster import servers
from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import parameter_server_strategy
from tfdist.data.input_fns import InputFn
from tfdist.placement.scope import placed_scope
from tfdist.training import optimizers
from tfdist.training.coordinated_loop import CoordinatedLoop
from tfdist.training.fence import Generations
from tfdist.training.loop import automatic_steps_per_dispatch, run_steps_ahead
from tfdist.training.step import ModelStep

_COMMON = {"who": "tfdist", "optimizer": "adagrad", "rows": 100_000}
_MANY = 1 << 40  # More steps than the benchmark ever runs.


class _EmptyStep:
    """A step for `run_steps_ahead` that ignores its batch."""

    staleness = None  # Nothing is updated.

    def __init__(self) -> None:
        self.model = keras.Sequential([keras.Input([1])])
        self.model.compile()

    def zero_states(self) -> list[tf.Tensor]:
        return []

    def reset(self) -> None:
        pass

    def begin(self, batch: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return batch

    def read(self, begun: tf.Tensor) -> tf.Tensor:
        return begun

    def end(
        self,
        begun: tf.Tensor,
        states: list[tf.Tensor],
        fence: Any,
        following: Iterator[tf.Tensor],
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        return states, next(following, None)

    def evaluate_alone(self, batch: tf.Tensor) -> tf.Tensor:
        return self.pack([])

    def pack(self, states: list[tf.Tensor]) -> tf.Tensor:
        return tf.zeros([1], tf.float64)

    def result(self, packed: Any) -> dict[str, float]:
        return {}


def _no_examples(context: tf.distribute.InputContext) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(0.0).repeat()


def _scenario(
    name: str, scope: Callable[[], Any]
) -> tuple[Any, tf.Variable, InputFn, int]:
    """Builds a scenario, for the coordinator or a client.

    Args:
        name: One of `SCENARIOS`.
        scope: Returns the context that places the variables.

    Returns:
        The step, `global_step`, the input function, and the steps per dispatch.
    """
    if name == "empty":
        with scope():
            global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
        return _EmptyStep(), global_step, _no_examples, 10
    case = _COMMON | SCENARIOS[name]
    examples = ps_task.input_fn(case["rows"])
    with scope():
        global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
        model = ps_task.model_fn(case)
        optimizers.build(model.optimizer, model.trainable_variables)
    spec = examples(tf.distribute.InputContext()).element_spec
    step = ModelStep(model, spec, global_step=global_step, remote=True)
    size = automatic_steps_per_dispatch(len(model.trainable_variables))
    return step, global_step, examples, size


class _Coordinated:
    """Runs the scenarios with a coordinator and its workers."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._strategy = parameter_server_strategy(cluster)
        self._loops: dict[str, CoordinatedLoop] = {}
        self._rates: dict[str, float] = {}

    def build(self, name: str) -> int:
        """Builds the loops of a scenario; returns the steps per dispatch."""
        step, global_step, examples, full = _scenario(
            name,
            functools.partial(
                placed_scope, self._strategy, num_ps=self._cluster.num_ps
            ),
        )
        for form, size in (("full", full), ("one", 1)):
            self._loops[form] = CoordinatedLoop(
                step,
                global_step,
                examples,
                strategy=self._strategy,
                num_workers=self._cluster.num_workers,
                steps_per_dispatch=size,
            )
            for _ in range(2):  # Each call traces.
                self._loops[form].run(5 * full)
            self._rates[form] = self._timed(form, 5 * full)
        return full

    def rate(self, form: str, secs: float) -> float:
        """Returns the steps per second, measured over about `secs` seconds."""
        steps = max(10, int(secs * self._rates[form] / 10)) * 10
        self._rates[form] = self._timed(form, steps)
        return self._rates[form]

    def _timed(self, form: str, steps: int) -> float:
        """Measures between other steps in flight, as in a session."""
        loop = self._loops[form]
        loop.run(10, ahead=_MANY)
        start = time.monotonic()
        loop.run(steps, ahead=_MANY)
        rate = steps / (time.monotonic() - start)
        loop.wait_for_steps()
        return rate


class _Clients:
    """The chief's handle on the client processes, which run the scenarios."""

    def __init__(self, case: dict[str, Any], cluster: Cluster) -> None:
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.replication_task"),
                    json.dumps({**case, "index": i}),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(cluster.num_workers)
        ]

    def build(self, name: str) -> None:
        """Builds a scenario; client 0 initializes it, as TF1's chief did."""
        first, *others = self._processes
        for group in ([first], others):
            for process in group:
                self._send(process, ["build", name])
            for process in group:
                self._answer(process)
        for form in ("full", "one", "bare"):
            self.rate(form, 0.2)  # Traces.

    def rate(self, form: str, secs: float) -> float:
        """Returns the total steps per second of all clients."""
        for process in self._processes:
            self._send(process, ["rate", form, secs])
        return sum([self._answer(process) for process in self._processes])

    def check(self) -> None:
        """Exits with an error unless ps and clients counted the same steps."""
        done, counted = 0, set()
        for process in self._processes:
            self._send(process, ["count"])
            own, of_all = self._answer(process)
            done += own
            counted.add(of_all)
        if counted != {done}:
            sys.exit(f"The clients ran {done} steps; the ps counted {counted}.")

    def end(self) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait(60)

    def _send(self, process: subprocess.Popen, what: list[Any]) -> None:
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()

    def _answer(self, process: subprocess.Popen) -> Any:
        line = process.stdout.readline()
        if not line:
            sys.exit(f"A client failed with {process.wait()}.")
        return json.loads(line)


class _Shared(UninitializedVariable):
    """A variable that all clients share by its name.

    In eager mode, TensorFlow allows a `shared_name` only in the raw op.
    """

    def __init__(self, like: tf.Variable, device: str, name: str) -> None:
        with tf.device(device):
            super().__init__(
                shape=like.shape, dtype=like.dtype, trainable=like.trainable
            )
            self._named = tf.raw_ops.VarHandleOp(
                shape=like.shape, dtype=like.dtype, shared_name=name
            )
        # Functions need the shape of the values that they read.
        self._named._handle_data = super().handle._handle_data

    @property
    def handle(self) -> tf.Tensor:
        return self._named


class _Sharing:
    """Creates variables that all clients share, on the ps in turn.

    Slots are placed with their variable; metric variables stay in the client.

    Args:
        name: Name of the scenario, a prefix of the variables' names.
        num_ps: Number of parameter servers.
        initializes: Whether this client initializes the variables. The other
            clients must create them later.
    """

    def __init__(self, name: str, num_ps: int, initializes: bool) -> None:
        self._name = name
        self._num_ps = num_ps
        self._initializes = initializes
        self._turns = self._count = 0

    def create(
        self,
        next_creator: Callable[..., tf.Variable],
        colocate_with: tf.Variable | None = None,
        **kwargs: Any,
    ) -> tf.Variable:
        """Creates a variable; a creator for `tf.variable_creator_scope`."""
        here = next_creator(**kwargs)
        if here.synchronization is tf.VariableSynchronization.ON_READ:
            return here
        device = here.device if colocate_with is None else colocate_with.device
        if "/job:ps/" not in device:
            turn, self._turns = self._turns % self._num_ps, self._turns + 1
            device = f"/job:ps/task:{turn}/device:CPU:0"
        self._count += 1
        shared = _Shared(here, device, f"{self._name}/{self._count}")
        if self._initializes:
            shared.assign(here)
        return shared


class _Client:
    """A client, in its own process."""

    def __init__(self, case: dict[str, Any], cluster: Cluster) -> None:
        self._index = case["index"]
        self._cluster = cluster
        tf.config.threading.set_inter_op_parallelism_threads(
            servers.inter_op_threads()
        )
        servers.reconnect_quickly()
        ps = cluster.training_spec()["ps"]
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec({"ps": ps}), job_name="client"
        )
        self._ps_devices = [
            device.name
            for device in tf.config.list_logical_devices("CPU")
            if device.name.startswith("/job:ps/")
        ]

    def build(self, name: str) -> None:
        """Creates or finds the variables of a scenario."""
        sharing = _Sharing(name, self._cluster.num_ps, self._index == 0)
        with tf.variable_creator_scope(sharing.create):
            step, self._global_step, examples, full = _scenario(
                name, contextlib.nullcontext
            )
            self._done = 0
            generations = Generations(self._ps_devices)
            self._forms = {}
            for form, size in (("full", full), ("one", 1), ("bare", 1)):
                with tf.device(self._global_step.device):
                    tickets = tf.Variable(0, dtype=tf.int64, trainable=False)
                function = _dispatch(
                    step,
                    size,
                    generations,
                    None if form == "bare" else tickets,
                )
                self._forms[form] = function, size
        context = tf.distribute.InputContext(
            self._cluster.num_workers, self._index, 1
        )
        self._iterator = iter(examples(context))

    def rate(self, form: str, secs: float) -> float:
        """Returns the steps per second of this client."""
        function, size = self._forms[form]
        first_step = tf.constant(0, tf.int64)
        generation = tf.constant(0.0)
        call = functools.partial(
            function, self._iterator, first_step, generation
        )
        call()  # The first call traces.
        steps, start = 0, time.monotonic()
        while (now := time.monotonic()) < start + secs:
            call().numpy()
            steps += size
        call()  # The others may still count.
        self._done += steps + 2 * size
        return steps / (now - start)

    def count(self) -> tuple[int, int]:
        """Returns the number of steps of this client, and of all clients."""
        return self._done, int(self._global_step.numpy())


def _dispatch(
    step: Any,
    size: int,
    generations: Generations,
    tickets: tf.Variable | None,
) -> Callable[..., tf.Tensor]:
    """Returns the `tf.function` that a client calls in a loop.

    Args:
        step: The step.
        size: Number of steps per dispatch.
        generations: Source of the fence that updates pass.
        tickets: Counter of dispatches, on a ps, which prevents clients from
            running the same steps or going beyond the last one. `None`: no
            counter and no fence, as in TF1.
    """

    @functools.partial(tf.function, autograph=False)
    def dispatch(
        iterator: Any, first_step: tf.Tensor, generation: tf.Tensor
    ) -> tf.Tensor:
        if tickets is None:
            return run_steps_ahead(step, size, iterator, first_step, None)
        with tf.device(tickets.device):
            ticket = tf.raw_ops.ResourceCountUpTo(
                resource=tickets.handle, limit=_MANY, T=tf.int64
            )
        fence = generations.fence(generation)
        return run_steps_ahead(step, size, iterator, ticket * size, fence)

    return dispatch


def main() -> None:
    """Runs a server, the measurement or a client."""
    case = json.loads(sys.argv[1])
    cluster = Cluster.from_env()
    if "index" in case:
        _serve_client(case, cluster)
    elif cluster.role != "chief":
        servers.serve(cluster)
    else:
        rates = _measure(case, cluster)
        pathlib.Path(case["output"]).write_text(json.dumps(rates))
        servers.release(cluster)


def _serve_client(case: dict[str, Any], cluster: Cluster) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Output of libraries must not mix with answers.
    client = _Client(case, cluster)
    for line in sys.stdin:
        what, *args = json.loads(line)
        answer = getattr(client, what)(*args)
        print(json.dumps(answer), file=answers, flush=True)


def _measure(case: dict[str, Any], cluster: Cluster) -> dict[str, Any]:
    """Returns the steps per dispatch and the rates of each scenario."""
    clients = _Clients(case, cluster)
    coordinated = _Coordinated(cluster)
    results = {}
    for name in case["scenarios"]:
        full = coordinated.build(name)
        clients.build(name)
        rates: dict[str, list[float]] = {}
        for _ in range(case["rounds"]):
            for who, forms in (
                (coordinated, ("full", "one")),
                (clients, ("full", "one", "bare")),
            ):
                kind = "clients" if who is clients else "coordinator"
                for form in forms:
                    rates.setdefault(f"{kind} {form}", []).append(
                        who.rate(form, case["secs"])
                    )
        if name != "empty":  # The empty step does not count.
            clients.check()
        results[name] = {"steps_per_dispatch": full, "rates": rates}
    clients.end()
    return results


if __name__ == "__main__":
    main()
