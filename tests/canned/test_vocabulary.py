import pytest
import tensorflow as tf

from tfdist.canned.vocabulary import Vocabulary


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_integers(dtype):
    values = tf.constant([7, 8, -1, 3], dtype)
    assert Vocabulary([7, 3]).ids(values).numpy().tolist() == [0, -1, -1, 1]


def test_large_vocabulary():
    vocabulary = Vocabulary([f"word {i}" for i in range(1000)])
    values = tf.constant([[f"word {i}" for i in range(999, -1, -1)]])
    got = vocabulary.ids(values).numpy()
    assert got.tolist() == [list(range(999, -1, -1))]
    assert len(vocabulary) == 1000


@pytest.mark.parametrize("words", [[], ["a", "b", "a"]])
def test_bad_vocabulary(words):
    with pytest.raises(ValueError, match="must be a list of distinct words"):
        Vocabulary(words)
