import logging

import tensorflow as tf

from tfdist._tf.tracing import traced


class Doubles:
    def __init__(self, function):
        self.call = function(self.double)

    def double(self, x):
        return 2 * x


def test_objects_that_call_their_function_once_are_no_retracing(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            assert Doubles(traced).call(tf.constant(2)) == 4
    assert "retracing" not in caplog.text
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            Doubles(tf.function).call(tf.constant(2))
    assert "retracing" in caplog.text
