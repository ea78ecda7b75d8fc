import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.canned import heads
from tfdist.canned.heads import class_head, regression_head

LOGITS = tf.constant([[2.0], [-1.0], [0.0], [-3.0]])
LABELS = tf.constant([1, 0, 1, 1])
WEIGHTS = tf.constant([[1.0], [2.0], [3.0], [4.0]])


def results(head, batches):
    """Values of the metrics after some (labels, logits, weights)."""
    metrics = head.metrics()
    for y, logits, weights in batches:
        heads.update(metrics, head.values(head.labels(y), logits), weights)
    return {name: float(m.result()) for name, m in metrics.items()}


def test_binary_metrics_by_hand():
    got = results(class_head(), [(LABELS, LOGITS, WEIGHTS)])
    p = tf.sigmoid(LOGITS).numpy()[:, 0]
    losses = -np.log(np.where(LABELS.numpy() == 1, p, 1 - p))
    w = WEIGHTS.numpy()[:, 0]
    # Predicted: 1, 0, 0 (a logit of 0 is class 0), 0.
    assert got["accuracy"] == pytest.approx((1 + 2) / 10)
    assert got["accuracy_baseline"] == pytest.approx(8 / 10)
    assert got["precision"] == 1.0
    assert got["recall"] == pytest.approx(1 / 8)
    assert got["label/mean"] == pytest.approx(8 / 10)
    assert got["prediction/mean"] == pytest.approx((p * w).sum() / 10)
    assert got["average_loss"] == pytest.approx((losses * w).sum() / 10)
    # Pairs of a positive and the negative one: right if 1 or 3 is heavier.
    assert got["auc"] == pytest.approx((1 + 3) / 8, abs=1e-3)
    assert set(got) == {
        "accuracy",
        "accuracy_baseline",
        "auc",
        "auc_precision_recall",
        "average_loss",
        "label/mean",
        "precision",
        "prediction/mean",
        "recall",
    }


@pytest.mark.parametrize(
    ("head", "logits", "labels"),
    [
        (class_head(), LOGITS, LABELS),
        (
            class_head(3),
            tf.random.normal([4, 3]),
            tf.constant([0, 2, 1, 2]),
        ),
        (
            regression_head(2),
            tf.random.normal([4, 2]),
            tf.random.normal([4, 2]),
        ),
    ],
)
def test_metrics_of_parts_add_up_to_those_of_all(head, logits, labels):
    metrics = [head.metrics() for _ in range(3)]
    for each, part in zip(
        metrics, (slice(4), slice(1), slice(1, 4)), strict=True
    ):
        values = head.values(head.labels(labels[part]), logits[part])
        heads.update(each, values, WEIGHTS[part])
    for name, whole in metrics[0].items():
        for i, variable in enumerate(whole.variables):
            assert variable.aggregation == "sum"
            parts = [each[name].variables[i] for each in metrics[1:]]
            np.testing.assert_allclose(
                sum(part.numpy() for part in parts),
                variable.numpy(),
                rtol=1e-5,
                atol=1e-5,
                err_msg=name,
            )


@pytest.mark.parametrize(
    ("reduction", "weights", "expected"),
    [
        ("sum_over_batch_size", None, (1 + 4 + 9 + 16) / 4),
        ("sum", None, 1 + 4 + 9 + 16),
        ("sum_over_batch_size", [[1.0], [2.0]], (1 + 4 + 18 + 32) / 4),
        ("sum", [[1.0, 2.0], [3.0, 4.0]], 1 + 8 + 27 + 64),
    ],
)
def test_loss_of_a_batch(reduction, weights, expected):
    head = regression_head(2)
    logits = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    losses = head.losses(head.labels(tf.zeros([2, 2])), logits)
    weights = None if weights is None else tf.constant(weights)
    assert heads.total_loss(losses, weights, reduction) == expected


def test_weights_of_each_label():
    got = results(
        regression_head(2),
        [
            (
                tf.constant([[1.0, 2.0]]),
                tf.zeros([1, 2]),
                tf.constant([[3.0, 1.0]]),
            )
        ],
    )
    assert got["label/mean"] == pytest.approx((3 + 2) / 4)
    assert got["average_loss"] == pytest.approx((3 + 4) / 4)


def test_predictions_of_two_classes():
    got = class_head(2, ["no", "yes"]).predictions(LOGITS)
    assert got["classes"][:, 0].numpy().tolist() == [
        b"yes",
        b"no",
        b"no",
        b"no",
    ]
    assert got["class_ids"][:, 0].numpy().tolist() == [1, 0, 0, 0]
    assert got["all_classes"].numpy().tolist() == [[b"no", b"yes"]] * 4
    assert got["all_class_ids"].numpy().tolist() == [[0, 1]] * 4
    np.testing.assert_allclose(
        got["probabilities"][:, 1:], got["logistic"], rtol=1e-6
    )


def test_predictions_of_classes_without_names():
    got = class_head(3).predictions(tf.constant([[0.0, 2.0, 1.0]]))
    assert got["classes"].numpy().tolist() == [[b"1"]]
    assert got["all_classes"].numpy().tolist() == [[b"0", b"1", b"2"]]
    assert "logistic" not in got


@pytest.mark.parametrize(
    ("head", "labels"),
    [
        (class_head(), [1.5]),
        (class_head(), [-1.0]),
        (class_head(2, ["a", "b"]), ["c"]),
        (class_head(3), [3]),
        (class_head(3, ["a", "b", "c"]), ["d"]),
    ],
)
def test_label_that_is_no_class(head, labels):
    with pytest.raises(tf.errors.InvalidArgumentError, match="Labels must be"):
        tf.function(head.labels)(tf.constant(labels))


def test_probabilities_are_labels_of_two_classes():
    labels = tf.function(class_head().labels)(tf.constant([0.25, 1.0]))
    assert labels.numpy().tolist() == [[0.25], [1.0]]


@pytest.mark.parametrize(
    ("head", "labels", "message"),
    [
        (class_head(), tf.constant(["a"]), "must be strings if"),
        (class_head(2, ["a", "b"]), tf.constant([1]), "must be strings if"),
        (class_head(3), tf.constant([1.0]), "must be integers"),
        (class_head(), None, "Received: only features"),
        (regression_head(2), tf.zeros([3]), r"\(batch, 2\)\. Received: \(3,\)"),
        (regression_head(), tf.zeros([3, 2]), r"\(batch, 1\) or \(batch,\)"),
        (regression_head(), tf.sparse.from_dense([[1.0]]), "must be a dense"),
    ],
)
def test_labels_of_another_form(head, labels, message):
    with pytest.raises(ValueError, match=message):
        head.labels(labels)


@pytest.mark.parametrize(
    ("head", "size"), [(class_head(3), 1), (regression_head(2), 2)]
)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_labels_whose_width_only_a_step_knows(head, size, width):
    """They would be broadcast: one-hot labels, or one for two outputs."""

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int64)])
    def labels(values):
        return head.labels(values)

    values = tf.ones([4, width], tf.int64)
    if width == size:
        assert labels(values).shape == values.shape
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="compatible"):
            labels(values)


def test_metrics_are_named_as_their_keys():
    for head in (class_head(), class_head(3), regression_head()):
        for name, metric in head.metrics().items():
            assert isinstance(metric, keras.Metric)
            assert metric.name == name
