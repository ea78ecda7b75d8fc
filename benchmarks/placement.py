"""How evenly each placement balances the variables of real models.

    python -m benchmarks.placement

prints, for each model and number of parameter servers, the largest load over
the mean load by bytes for round robin, greedy in creation order, and the
planner: without splitting, and with large variables split into equal parts.
Then the distance from the lower bound of both, and whether the bound rests on
one variable. At the end, the seconds a plan for 10,000 variables on 100 servers
takes.
"""

import itertools
import time
from collections.abc import Callable, Sequence

import keras
import numpy as np

from tfdist.placement.planner import plan, simulate
from tfdist.placement.plans import Plan
from tfdist.placement.strategies import (
    GreedyLoadBalancingStrategy,
    RoundRobinStrategy,
    byte_size_load_fn,
)
from tfdist.placement.variables import VariableSpec, describe

# Rows of the 26 categorical features of the Criteo Kaggle data, as in the
# DLRM reference implementation.
CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683,
    8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15,
    286181, 105, 142572,
)  # fmt: skip


def _specs(shapes: Sequence[Sequence[int]]) -> tuple[VariableSpec, ...]:
    return tuple(
        VariableSpec(f"v{i}", tuple(shape)) for i, shape in enumerate(shapes)
    )


def _dense(*units: int) -> list[tuple[int, ...]]:
    pairs = itertools.pairwise(units)
    return [shape for a, b in pairs for shape in ((a, b), (b,))]


def vgg16() -> tuple[VariableSpec, ...]:
    """VGG16, 138 million parameters, three quarters of them in one kernel."""
    return describe(lambda: keras.applications.VGG16(weights=None))


def resnet50() -> tuple[VariableSpec, ...]:
    """ResNet-50, with its moving averages."""
    return describe(lambda: keras.applications.ResNet50(weights=None))


def bert_base() -> tuple[VariableSpec, ...]:
    """BERT-base: 12 layers of width 768, 30,522 word pieces."""
    norm = [(768,), (768,)]
    layer = _dense(768, 768) * 4 + norm + _dense(768, 3072, 768) + norm
    return _specs(
        [(30522, 768), (512, 768), (2, 768), *norm, *layer * 12]
        + [*_dense(768, 768), *_dense(768, 768), *norm, (30522,)]
    )


def lstm_translator() -> tuple[VariableSpec, ...]:
    """GNMT: 8 + 8 LSTM layers of 1024 units, 32,000 words each way."""
    layer = [(1024, 4096), (1024, 4096), (4096,)]
    # The second encoder layer reads both directions, every decoder layer the
    # attention's context as well.
    wide = [(2048, 4096), (1024, 4096), (4096,)]
    encoder = layer * 2 + wide + layer * 6
    attention = [(1024, 1024), (1024, 1024), (1024,)]
    return _specs(
        [(32000, 1024), *encoder, (32000, 1024), *attention, *wide * 8]
        + _dense(1024, 32000)
    )


def wide_and_deep() -> tuple[VariableSpec, ...]:
    """8 features of 100,000 buckets: width 16 deep, width 1 wide."""
    return _specs(
        [(100_000, 1)] * 8 + [(1,)] + [(100_000, 16)] * 8
        + _dense(128, 64, 32, 1)
    )  # fmt: skip


def dlrm() -> tuple[VariableSpec, ...]:
    """DLRM on Criteo Kaggle: 26 tables of width 16."""
    return _specs(
        [(rows, 16) for rows in CRITEO_ROWS]
        + _dense(13, 512, 256, 64, 16)
        + _dense(367, 512, 256, 1)
    )


MODELS: dict[str, Callable[[], tuple[VariableSpec, ...]]] = {
    "VGG16": vgg16,
    "ResNet-50": resnet50,
    "BERT-base": bert_base,
    "LSTM translator": lstm_translator,
    "wide and deep": wide_and_deep,
    "DLRM, 26 tables": dlrm,
}


def compare(variables: Sequence[VariableSpec], num_ps: int) -> dict[str, Plan]:
    """Returns the plan of each placement, by its name."""
    greedy = GreedyLoadBalancingStrategy(num_ps, byte_size_load_fn)
    return {
        "round robin": simulate(variables, num_ps, RoundRobinStrategy(num_ps)),
        "greedy": simulate(variables, num_ps, greedy),
        "planned": plan(variables, num_ps),
        "split": plan(variables, num_ps, split=True),
    }


def seconds(num_variables: int = 10_000, num_ps: int = 100) -> dict[str, float]:
    """Returns how long plans for many variables of log-normal size take."""
    rows = np.random.default_rng(0).lognormal(6, 2, num_variables).astype(int)
    variables = _specs([(int(n) + 1, 16) for n in rows])
    taken = {}
    for name, split in (("planned", False), ("split", True)):
        start = time.perf_counter()
        plan(variables, num_ps, split=split)
        taken[name] = time.perf_counter() - start
    return taken


def main() -> None:
    """Prints the table."""
    print("largest load over mean load, by bytes; distance from the bound")
    print(
        f"{'model':<16}{'MB':>6}{'ps':>4}{'robin':>7}{'greedy':>7}{'plan':>7}"
        f"{'split':>7}{'plan dist':>11}{'split dist':>11}  bound"
    )
    for model, variables_of in MODELS.items():
        variables = variables_of()
        for num_ps in (2, 3, 8, 32):
            plans = compare(variables, num_ps)
            figures = "".join(f"{p.imbalance:7.3f}" for p in plans.values())
            planned, split = plans["planned"], plans["split"]
            one = planned.lower_bound == planned.largest_indivisible
            print(
                f"{model:<16}{sum(planned.loads) / 1e6:6.0f}{num_ps:>4}"
                f"{figures}{planned.distance:11.3%}{split.distance:11.3%}"
                f"{'  one variable' if one else ''}"
            )
    for name, taken in seconds().items():
        print(f"10,000 variables on 100 servers, {name}: {taken:.2f} s")


if __name__ == "__main__":
    main()
