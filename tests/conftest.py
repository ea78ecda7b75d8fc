import tempfile

import pytest
import tensorflow as tf

from tfdist.data.input_fns import untuned


@pytest.fixture(autouse=True, scope="session")
def _temporary_files(tmp_path_factory):
    """Also what libraries forget in the system's folder goes with the tests."""
    tempfile.tempdir = str(tmp_path_factory.mktemp("temporary"))
    yield
    tempfile.tempdir = None


@pytest.fixture(autouse=True, scope="session")
def _no_tuner():
    """Also iterators that tests make themselves are dropped at once.

    The suite took twice as long: of those that were collected late, one in six
    held its process for up to a minute.
    """
    with pytest.MonkeyPatch.context() as patch:
        made = tf.data.Dataset.__iter__
        patch.setattr(
            tf.data.Dataset, "__iter__", lambda self: made(untuned(self))
        )
        yield
