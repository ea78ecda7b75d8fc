"""Four formulas for the costs of distributed training."""

import math
import statistics


def all_reduce_secs(
    size: float, replicas: int, bandwidth: float, latency: float
) -> float:
    """Returns the seconds of a ring all-reduce of `size` bytes.

    Each replica sends 2 (n - 1) messages of size / n to its neighbour, see
    Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms".

    >>> all_reduce_secs(100e6, 2, bandwidth=1e9, latency=0.0)
    0.1
    """
    messages = 2 * (replicas - 1) if size else 0
    return messages * (size / replicas / bandwidth + latency)


def pace(machines: int, spread: float) -> float:
    """Returns the step time of the slowest machine relative to the mean.

    Uses Blom's approximation (1958) of the largest of n normal numbers;
    `spread` is their standard deviation divided by their mean.

    >>> [round(pace(n, spread=0.2), 2) for n in (1, 2, 10, 100)]
    [1.0, 1.12, 1.31, 1.5]
    """
    smaller = (machines - 3 / 8) / (machines + 1 / 4)
    return 1 + spread * statistics.NormalDist().inv_cdf(smaller)


def ps_secs(
    size: float,
    largest: float,
    workers: int,
    num_ps: int,
    bandwidth: float,
    latency: float,
    workers_per_machine: int = 1,
) -> tuple[float, float]:
    """Seconds per step on a worker's link, and on that of the busiest server.

    A worker pulls the `size` bytes of weights that it reads, and pushes as many
    bytes of gradients, each with a request and a response. Meanwhile a server
    sends its share to all workers and receives as much; the busiest one holds
    at least the `largest` weight (Li et al., 2014, "Scaling distributed machine
    learning with the parameter server").

    >>> ps_secs(1e6, 4e5, 8, 4, bandwidth=1e9, latency=0.0)
    (0.002, 0.0032)
    """
    own = 2 * size * workers_per_machine / bandwidth + 4 * latency
    return own, workers * max(size / num_ps, largest) / bandwidth


def goodput(
    failures_per_sec: float, checkpoint_secs: float, restart_secs: float
) -> float:
    """Returns the share of useful time if a failure loses all unsaved work.

    See Daly, 2006, "A higher order estimate of the optimum checkpoint interval
    for restart dumps".

    >>> round(goodput(1 / 3600, checkpoint_secs=600, restart_secs=30), 2)
    0.91
    """
    work = failures_per_sec * checkpoint_secs
    restart = failures_per_sec * restart_secs
    if not work:
        return 1.0
    if work + restart > 700:  # `exp` would overflow: nothing is ever saved.
        return 0.0
    return work / (math.exp(restart) * math.expm1(work))
