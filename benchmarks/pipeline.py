"""Measures the time per batch of the deep-LSTM translator, by micro-batches.

    python -m benchmarks.pipeline [--picture=schedule.png]

Compares four LSTM layers, two on each of two devices, with both stages on one
device and undivided batches. A device is a CPU core (ops run on one thread),
except in the last row, where a single device has both cores. Each model runs in
a separate process; the processes take turns, one round of batches at a time.
Columns: the median time over the rounds, the speed relative to one device, and
the ideal speed given the bubble of the schedule, (S - 1) / (M + S - 1).

The picture shows the measured schedule of one batch: when each device worked on
each micro-batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import keras
import tensorflow as tf

from tfdist.pipeline.micro_batches import Work
from tfdist.pipeline.model_parallel import Pipeline, bubble
from trainer import translator

_STAGES = 2


def main() -> None:
    """Prints a row for each model and draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro_batches", default="1,2,4,8")
    parser.add_argument("--units", type=int, default=128)
    parser.add_argument("--length", type=int, default=12)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=3, help="in a round")
    parser.add_argument("--picture", default="")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        _serve(args)
        return
    pipelines = [int(m) for m in args.micro_batches.split(",")]
    one, both = (
        {"devices": 1, "micro_batches": 1, "threads": threads}
        for threads in (1, _STAGES)
    )
    cases = [
        one,
        *(
            {"devices": _STAGES, "micro_batches": m, "threads": 1}
            for m in pipelines
        ),
        both,
    ]
    children = [_Child(case) for case in cases]
    for child in children:
        child.ask("ready")
    for _ in range(args.rounds):
        for child in children:
            child.rounds.append(child.ask("round"))
    medians = [statistics.median(child.rounds) for child in children]
    print("devices  micro-batches  threads  ms per batch (range)  speed  ideal")
    for child, median in zip(children, medians, strict=True):
        case = child.case
        ideal = case["devices"] * (
            1 - bubble(case["devices"], case["micro_batches"])
        )
        told = f"{ideal:.2f}" if case is not both else ""
        print(
            f"{case['devices']:<8} {case['micro_batches']:<14} "
            f"{case['threads']:<8} "
            f"{median:7.1f} ({min(child.rounds):.0f}-{max(child.rounds):.0f})"
            f"{'':<6}{medians[0] / median:<6.2f} {told}",
            flush=True,
        )
    if args.picture:
        timelines = {
            case["micro_batches"]: child.ask("timeline")
            for case, child in zip(cases, children, strict=True)
            if case["devices"] == _STAGES
        }
        _draw(args.picture, timelines)
    for child in children:
        child.end()


class _Child:
    """A process that runs one model on request."""

    def __init__(self, case: dict[str, int]) -> None:
        self.case = case
        self.rounds: list[float] = []
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.pipeline", *sys.argv[1:]),
                f"--case={json.dumps(case)}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, what: str) -> Any:
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"{self.case} failed with {self._process.wait()}.")
        return json.loads(answer)

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


def _serve(args: argparse.Namespace) -> None:
    """Serves requests in a child process, one line of JSON per answer."""
    case = json.loads(args.case)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Output of libraries must not mix with answers.
    tf.config.threading.set_intra_op_parallelism_threads(case["threads"])
    tf.config.threading.set_inter_op_parallelism_threads(_STAGES)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * case["devices"],
    )
    sizes = {"vocabulary": 64, "length": args.length}
    model = _model(args.units, case, **sizes)
    (batch,) = translator.batches(args.batch, **sizes).take(1)
    step = tf.function(model.train_step, autograph=False)

    def run(num_batches: int) -> float:
        start = time.perf_counter()
        for _ in range(num_batches):
            logs = step(batch)
            logs["loss"].numpy()
        return (time.perf_counter() - start) / num_batches * 1000

    run(2)
    for line in sys.stdin:
        answer: Any = None
        if line.strip() == "round":
            answer = run(args.batches)
        elif line.strip() == "timeline":
            answer = [vars(work) for work in model.timeline(batch)]
        print(json.dumps(answer), file=answers, flush=True)


def _model(
    units: int, case: dict[str, int], vocabulary: int, length: int
) -> Pipeline:
    """Builds four layers in two stages, which may share a device."""
    layers = translator.stages(4, units, vocabulary)
    model = Pipeline(
        translator.inputs(length),
        [layers[0] + layers[1], layers[2] + layers[3]],
        num_micro_batches=case["micro_batches"],
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def _draw(path: str, timelines: dict[int, list[dict[str, Any]]]) -> None:
    """Draws a panel for each schedule, with a row of boxes per device."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    end = max(work["end"] for each in timelines.values() for work in each)
    figure, panels = pyplot.subplots(
        len(timelines),
        sharex=True,
        squeeze=False,
        figsize=(10, 1.5 * len(timelines) + 0.5),
        layout="constrained",
    )
    for (num, timeline), panel in zip(
        timelines.items(), panels[:, 0], strict=True
    ):
        for work in (Work(**each) for each in timeline):
            panel.barh(
                work.stage,
                1000 * (work.end - work.start),
                left=1000 * work.start,
                color="tab:blue" if work.forward else "tab:orange",
                edgecolor="white",
            )
            panel.text(
                500 * (work.start + work.end),
                work.stage,
                str(work.micro_batch),
                ha="center",
                va="center",
                color="white",
                fontsize=8,
            )
        panel.set_yticks(range(_STAGES))
        panel.set_yticklabels([f"device {i}" for i in range(_STAGES)])
        panel.invert_yaxis()
        panel.set_xlim(0, 1000 * end)
        panel.set_title(f"{num} micro-batches", loc="left", fontsize=9)
    panels[-1, 0].set_xlabel("ms   (blue: forward, orange: backward)")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
