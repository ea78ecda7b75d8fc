"""Trains, evaluates and exports a model: `python -m trainer.task`.

All tasks of a cluster run the same command; `TF_CONFIG` or `CLUSTER_SPEC` tells
each task its role. This file defines the flags and handles cloud services; the
data is in `trainer/data.py`, the model in `trainer/model.py`.

Exit codes: 0: the job is done; 134: a transient error, after which Vertex AI,
Kubeflow and `tfdist.launch` restart the task; 143: terminated by a signal; 1:
any other error, after which they do not restart it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

import keras
import tensorflow as tf
from absl import app, flags
from absl import logging as absl_logging

import tfdist
from trainer import data, model
from trainer.source import Source

FLAGS = flags.FLAGS

_RETRY = 134
_PASSING = (
    TimeoutError,
    ConnectionError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
    tf.errors.UnavailableError,
)

flags.DEFINE_string(
    "model_dir",
    None,
    "Folder of checkpoints and exports. Default: AIP_CHECKPOINT_DIR, if Vertex "
    "AI sets it, else runs/wide_and_deep.",
)
flags.DEFINE_string(
    "summary_dir",
    None,
    "Folder of TensorBoard summaries. Default: AIP_TENSORBOARD_LOG_DIR, if "
    "Vertex AI sets it, else the model_dir.",
)
flags.DEFINE_string(
    "export_dir",
    None,
    "Folder to copy the final model to, replacing any model there. Default: "
    "AIP_MODEL_DIR, if Vertex AI sets it, else the model is not copied.",
)
flags.DEFINE_multi_string("train_files", [], "CSV files: paths or patterns.")
flags.DEFINE_multi_string("eval_files", [], "CSV files: paths or patterns.")
flags.DEFINE_string("label", None, "Name of the label column.")
flags.DEFINE_list("numeric_columns", [], "Columns to read as numbers.")
flags.DEFINE_list("categorical_columns", [], "Columns to read as categories.")
flags.DEFINE_list("ignore_columns", [], "Columns to ignore.")
flags.DEFINE_integer(
    "min_count",
    1,
    "Strings that occur less often than this in the training data are treated "
    "as unknown.",
    lower_bound=1,
)
flags.DEFINE_string("tfds", None, "A tabular builder of TensorFlow Datasets.")
flags.DEFINE_string(
    "train_split", None, "Split of --tfds, e.g. 'train[:80%]'. Default: train."
)
flags.DEFINE_string(
    "eval_split",
    None,
    "Split of --tfds for evaluation. Default: that of the builder, or else a "
    "fifth of train.",
)
flags.DEFINE_string("data_dir", None, "Folder of prepared data sets.")
flags.DEFINE_integer("max_steps", 3000, "Training steps.", lower_bound=1)
flags.DEFINE_integer(
    "batch_size", 128, "Examples per step of a worker.", lower_bound=1
)
flags.DEFINE_integer(
    "global_batch_size",
    None,
    "Examples per step of an all-reduce job, over all processes; the job may "
    "then change its size. Default: --batch_size per process.",
    lower_bound=1,
)
flags.DEFINE_list("hidden_units", ["64", "32"], "Layer sizes, deep part.")
flags.DEFINE_integer("embedding_dim", 8, "Embedding size.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.15, "Adagrad's rate.", lower_bound=0.0)
flags.DEFINE_float(
    "wide_learning_rate",
    None,
    "Rate of Ftrl for the wide part. Default: Adagrad, as for the deep part.",
    lower_bound=0.0,
)
flags.DEFINE_integer(
    "save_checkpoints_steps", 1000, "Steps between checkpoints.", lower_bound=1
)
flags.DEFINE_integer(
    "log_steps", 100, "Steps between progress lines.", lower_bound=1
)
flags.DEFINE_integer(
    "steps_per_dispatch",
    None,
    "Steps a worker runs per request. Default: automatic.",
    lower_bound=1,
)
flags.DEFINE_enum(
    "placement",
    "round_robin",
    ["round_robin", "greedy", "planned"],
    "How variables are assigned to parameter servers.",
)
flags.DEFINE_integer(
    "plan_ps",
    None,
    "Prints a planned placement of the variables on this number of parameter "
    "servers, and exits.",
    lower_bound=1,
)
flags.DEFINE_float(
    "session_creation_timeout_secs",
    600.0,
    "Seconds that the chief waits for missing workers and parameter servers, "
    "at the start and after one is lost.",
    lower_bound=1.0,
)
flags.DEFINE_string(
    "tuning_metric",
    None,
    "Metric to report to a tuning job on Vertex AI; a trial fails if its "
    "evaluations do not have this metric.",
)
flags.DEFINE_integer("seed", 0, "Seed of initial weights and shuffling.")
flags.DEFINE_bool(
    "json_logs",
    None,
    "Write log lines as JSON to stdout, so that Cloud Logging reads severities."
    " Default: on Vertex AI, which shows all of stderr as errors.",
)


def source() -> Source:
    """Returns the source of examples that the flags specify.

    Raises:
        ValueError: the flags contradict each other or are incomplete.
    """
    files = FLAGS.train_files or FLAGS.eval_files
    if FLAGS.tfds and files:
        raise ValueError("Pass --tfds or --train_files/--eval_files, not both.")
    if (FLAGS.train_split or FLAGS.eval_split) and not FLAGS.tfds:
        raise ValueError("--train_split and --eval_split require --tfds.")
    of_files = ["numeric_columns"]
    if not FLAGS.tfds:
        of_files += ["label", "categorical_columns", "ignore_columns"]
    given = [f"--{name}" for name in of_files if FLAGS[name].value]
    if given and not files:
        raise ValueError(
            f"{', '.join(given)}: only for CSV data, but --train_files and "
            "--eval_files are missing."
        )
    columns = {
        "categorical_columns": FLAGS.categorical_columns,
        "ignore_columns": FLAGS.ignore_columns,
        "min_count": FLAGS.min_count,
    }
    if FLAGS.tfds:
        return data.tfds_source(
            FLAGS.tfds,
            FLAGS.data_dir,
            train_split=FLAGS.train_split,
            eval_split=FLAGS.eval_split,
            label=FLAGS.label,
            **columns,
        )
    if not files:
        return data.click_log_source(FLAGS.data_dir, min_count=FLAGS.min_count)
    required = ("train_files", "eval_files", "label")
    missing = [f"--{name}" for name in required if not FLAGS[name].value]
    if missing:
        raise ValueError(
            "CSV data requires --train_files, --eval_files and --label. "
            f"Missing: {', '.join(missing)}."
        )
    return data.csv_source(
        FLAGS.train_files,
        FLAGS.eval_files,
        FLAGS.label,
        numeric_columns=FLAGS.numeric_columns,
        **columns,
    )


def optimizer() -> keras.optimizers.Optimizer:
    """Returns Adagrad, or Ftrl for the wide part and Adagrad for the rest."""
    deep = keras.optimizers.Adagrad(FLAGS.learning_rate)
    if FLAGS.wide_learning_rate is None:
        return deep
    wide = keras.optimizers.Ftrl(FLAGS.wide_learning_rate)
    return tfdist.MultiOptimizer([("^wide", wide), ("", deep)])


def batch_size(context: tf.distribute.InputContext) -> int:
    """Returns the number of examples in a step of one worker."""
    if FLAGS.global_batch_size is None:
        return FLAGS.batch_size
    return context.get_per_replica_batch_size(FLAGS.global_batch_size)


def train_and_evaluate(
    examples: Source, config: tfdist.RunConfig
) -> tuple[dict[str, float] | None, list[str | None]]:
    """Runs this task's part of the job; see `tfdist.train_and_evaluate`."""
    if FLAGS.global_batch_size is not None and config.strategy_name == "ps":
        raise ValueError(
            "--global_batch_size is for processes that train synchronously, "
            "not for workers of parameter servers. Pass --batch_size instead."
        )
    hidden = [int(u) if u.isdecimal() else 0 for u in FLAGS.hidden_units]
    if not all(hidden):
        raise ValueError(
            "--hidden_units must be integers of at least 1, such as 64,32. "
            f"Received: {','.join(FLAGS.hidden_units)}."
        )
    schema_path = os.path.join(config.model_dir, "schema.json")
    if not FLAGS.plan_ps:
        examples.share_schema(schema_path, config.cluster)

    # The schema is read on first use; parameter servers never need it.
    @functools.cache
    def preprocessor() -> keras.Model:
        return model.preprocessor(examples.schema)

    def model_fn() -> keras.Model:
        return model.build(
            examples.schema,
            optimizer=optimizer(),
            hidden_units=hidden,
            embedding_dim=FLAGS.embedding_dim,
        )

    def train_input_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return examples.train_input_fn(
            context,
            batch_size=batch_size(context),
            transform=preprocessor(),
            seed=FLAGS.seed,
        )

    def eval_input_fn() -> tf.data.Dataset:
        return examples.eval_input_fn(transform=preprocessor())

    estimator = tfdist.Estimator(model_fn, config)
    if FLAGS.plan_ps:
        print(estimator.plan(FLAGS.plan_ps).table())
        return None, []
    return tfdist.train_and_evaluate(
        estimator,
        tfdist.TrainSpec(
            train_input_fn,
            max_steps=FLAGS.max_steps,
            hooks=tuning_hooks(estimator.eval_dir()),
        ),
        tfdist.EvalSpec(
            eval_input_fn,
            steps=None,
            exporters=(
                tfdist.LatestExporter(
                    "serving",
                    lambda trained: model.serving_model(
                        trained, examples.schema
                    ),
                    assets_extra={"schema.json": schema_path},
                ),
            ),
            start_delay_secs=0,
            throttle_secs=10,
        ),
    )


def tuning_hooks(eval_dir: str) -> list[tfdist.SessionRunHook]:
    """Returns hooks that report evaluations to a Vertex AI tuning job."""
    trial = _trial()
    if trial is None:
        return []
    tag = FLAGS.tuning_metric
    return [tfdist.estimator.ReportMetricsHook(eval_dir, *trial, tag=tag)]


def _trial() -> tuple[str, str] | None:
    """Returns the metric file and the id of this trial, or None if no trial."""
    path = os.environ.get("CLOUD_ML_HP_METRIC_FILE")
    return (path, os.environ.get("CLOUD_ML_TRIAL_ID", "")) if path else None


def directories() -> tuple[str, str | None, str | None]:
    """Returns the directories of checkpoints, summaries, the final model."""
    find = os.environ.get
    return (
        FLAGS.model_dir
        or find("AIP_CHECKPOINT_DIR")
        or os.path.join("runs", "wide_and_deep"),
        FLAGS.summary_dir or find("AIP_TENSORBOARD_LOG_DIR") or None,
        FLAGS.export_dir or find("AIP_MODEL_DIR") or None,
    )


def report(
    examples: Source,
    config: tfdist.RunConfig,
    metrics: dict[str, float],
    exports: Sequence[str],
    secs: float,
) -> str:
    """Returns the final metrics and the output paths as text."""
    values = {k: v for k, v in metrics.items() if k != "global_step"}
    rows = [f"  {name:<12}{value:>10.4f}" for name, value in values.items()]
    if best := examples.best_auc:
        rows.append(
            f"  {'best auc':<12}{best:>10.4f}  possible on this data; the "
            f"model reached {metrics['auc'] / best:.1%} of it"
        )
    summaries = config.summary_dir or config.model_dir
    return "\n".join(
        [
            f"Data: {examples.description}",
            f"Evaluation after {metrics['global_step']} steps:",
            *rows,
            f"Checkpoints: {config.model_dir}",
            f"Summaries: tensorboard --logdir={summaries}",
            *(f"Exported model: {path}" for path in exports),
            f"Time: {secs:.0f} s",
        ]
    )


class _PlainFormatter(logging.Formatter):
    """Formats a record as its message, preceded by WARNING or higher levels."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        # In a terminal, clear the line: it may show the training progress.
        return f"\x1b[K{text}" if sys.stderr.isatty() else text


class _JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON, as Cloud Logging expects it."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "severity": record.levelname,
            "message": super().format(record),
            "logger": record.name,
        }
        return json.dumps(fields)


def _set_up_logs() -> None:
    """Sets up logging; without --verbosity, hides TensorFlow's messages."""
    handler = absl_logging.get_absl_handler()
    quiet = not FLAGS["verbosity"].present
    as_json = FLAGS.json_logs
    if as_json is None:
        as_json = bool(os.environ.get("CLUSTER_SPEC"))
    if quiet:
        absl_logging.set_verbosity(absl_logging.ERROR)
        tf.get_logger().setLevel(logging.ERROR)
    if as_json:
        handler.python_handler.stream = sys.stdout
        handler.setFormatter(_JsonFormatter())
    elif quiet:
        handler.setFormatter(_PlainFormatter())
    for package in ("tfdist", "trainer"):
        logging.getLogger(package).setLevel(logging.INFO)


def _exit_code(error: BaseException) -> int:
    """Returns the exit code, which tells whether a retry may succeed.

    >>> _exit_code(TimeoutError("a task is missing"))
    134
    >>> _exit_code(ValueError("no such column"))
    1
    """
    return _RETRY if isinstance(error, _PASSING) else 1


def main(argv: Sequence[str]) -> None:
    """Runs the job; reports errors in one message, without a traceback."""
    start = time.monotonic()
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments: {' '.join(argv[1:])}")
    _set_up_logs()
    try:
        examples = source()
        model_dir, summary_dir, export_dir = directories()
        config = tfdist.RunConfig(
            model_dir,
            summary_dir=summary_dir,
            tf_random_seed=FLAGS.seed,
            save_checkpoints_steps=FLAGS.save_checkpoints_steps,
            log_step_count_steps=FLAGS.log_steps,
            steps_per_dispatch=FLAGS.steps_per_dispatch,
            placement=FLAGS.placement,
            session_creation_timeout_secs=FLAGS.session_creation_timeout_secs,
        )
        leads = config.cluster.role in ("local", "chief")
        if leads and export_dir:
            tfdist.vertex.check_export_dir(export_dir)
        metrics, exported = train_and_evaluate(examples, config)
        exports = [path for path in exported if path]
        if leads and exports and export_dir:
            tfdist.vertex.copy_export(exports[0], export_dir)
            exports.append(export_dir)
    except (ValueError, OSError, *_PASSING) as error:
        logging.debug("Traceback of the error below:", exc_info=True)
        text = f"error: {error}\n(--verbosity=1 shows the traceback.)"
        print(text, file=sys.stderr)
        sys.exit(_exit_code(error))
    except KeyboardInterrupt:
        print("\nInterrupted. To resume from the checkpoint, run it again.")
        sys.exit(128 + signal.SIGINT)
    if leads and metrics:
        secs = time.monotonic() - start
        print(report(examples, config, metrics, exports, secs))
        if trial := _trial():
            tfdist.estimator.report_metrics(metrics, *trial)


if __name__ == "__main__":
    app.run(main)
