import threading

import pytest
import tensorflow as tf

from tfdist._tf.mutex import locked


def test_what_is_read_and_written_alone_is_right():
    count = tf.Variable(0)

    @tf.function
    def step():
        for _ in range(20):
            locked("count", lambda: count.assign(count + 1))

    step()  # The first call holds the others up.
    together = threading.Barrier(4)

    def run():
        together.wait(60)
        for _ in range(200):
            step()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.numpy() == 20 * (1 + 4 * 200)


def test_who_fails_alone_lets_others_go_on():
    count = tf.Variable(0)

    @tf.function
    def step(fails):
        def run():
            check = tf.debugging.Assert(~fails, ["It fails."])
            with tf.control_dependencies([check]):
                count.assign_add(1)

        locked("fails", run)

    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError, match="It fails"):
            step(tf.constant(True))
        step(tf.constant(False))
    assert count.numpy() == 3
