import gc
import os
import random
import tempfile
import time
from unittest import mock

import pytest

# Read first, so that no process is left alone with one of them at the end.
LONGEST = ("test_notebooks.py", "test_cases.py", "test_canned.py")


def pytest_addoption(parser):
    parser.addoption(
        "--until",
        type=float,
        metavar="SECS",
        help="skip what has not begun at this time, in seconds as `date +%%s`",
    )


def pytest_configure(config):
    """Before the tests are imported, by who runs them: xdist's master waits."""
    if config.getoption("dist", "no") != "no":
        return
    gc.disable()  # Until all is collected.
    import tensorflow  # noqa: F401

    # What gRPC does in a fork kills it, sometimes. It reads this once.
    with mock.patch.dict(os.environ, GRPC_ENABLE_FORK_SUPPORT="0"):
        import grpc

        grpc.insecure_channel("localhost:1").close()


def pytest_collection_modifyitems(config, items):
    until = config.getoption("--until")

    def place(item):
        # Others are left out each time, where the time does not suffice.
        chance = random.Random(f"{until} {item.path}").random() if until else 0
        return item.path.name not in LONGEST, chance

    items.sort(key=place)


def pytest_collection_finish():
    """What there is by now stays: no later collection looks at it again."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    until = item.config.getoption("--until")
    if until and time.time() > until:
        pytest.skip("no time is left")


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
    import tensorflow as tf

    from tfdist.data.input_fns import untuned

    with pytest.MonkeyPatch.context() as patch:
        made = tf.data.Dataset.__iter__
        patch.setattr(
            tf.data.Dataset, "__iter__", lambda self: made(untuned(self))
        )
        yield
