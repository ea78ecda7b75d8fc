"""The same model and examples, by tfdist: every task runs this program.

Usage: one_fit.py MODEL_DIR [STRATEGY], with or without a cluster.
"""

import sys

from stock import examples, kernel_of, model_fn, say

import tfdist


def main(model_dir: str, strategy: str = "auto") -> None:
    """Trains ten times with the four batches."""
    model, history = tfdist.fit(
        model_fn,
        examples,
        epochs=10,
        steps_per_epoch=4,
        model_dir=model_dir,
        strategy=strategy,
        log_step_count_steps=None,
    )
    if history:
        steps = int(model.optimizer.iterations.numpy())
        loss = history.history["loss"][-1]
        say(steps=steps, loss=loss, kernel=kernel_of(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
