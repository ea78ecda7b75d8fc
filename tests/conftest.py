import gc
import os
import random
import tempfile
import time
from unittest import mock

import pytest

# Run first, so that none of them delays the end of the run on one process.
LONGEST = ("test_notebooks.py", "test_cases.py", "test_canned.py")


def pytest_addoption(parser):
    parser.addoption(
        "--until",
        type=float,
        metavar="SECS",
        help="skip tests that have not started by this time (`date +%%s`)",
    )


def pytest_configure(config):
    """Imports TensorFlow and gRPC, except in the master of xdist."""
    if config.getoption("dist", "no") != "no":
        return
    gc.disable()  # Until all tests are collected.
    import tensorflow  # noqa: F401

    # gRPC's fork support sometimes kills a fork. It reads this setting once.
    with mock.patch.dict(os.environ, GRPC_ENABLE_FORK_SUPPORT="0"):
        import grpc

        grpc.insecure_channel("localhost:1").close()


def pytest_collection_modifyitems(config, items):
    until = config.getoption("--until")

    def place(item):
        # If time does not suffice, a different part is skipped each time.
        chance = random.Random(f"{until} {item.path}").random() if until else 0
        return item.path.name not in LONGEST, chance

    items.sort(key=place)


def pytest_collection_finish():
    """Freezes all objects, so that later garbage collections skip them."""
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
    """Also deletes temporary files that libraries forget, with the tests'."""
    tempfile.tempdir = str(tmp_path_factory.mktemp("temporary"))
    yield
    tempfile.tempdir = None


@pytest.fixture(autouse=True, scope="session")
def _no_tuner():
    """Disables autotuning, also of iterators that tests create themselves.

    Otherwise the suite takes twice as long: one in six tuned iterators that
    are collected late blocks its process for up to a minute.
    """
    import tensorflow as tf

    from tfdist.data.input_fns import untuned

    with pytest.MonkeyPatch.context() as patch:
        made = tf.data.Dataset.__iter__
        patch.setattr(
            tf.data.Dataset, "__iter__", lambda self: made(untuned(self))
        )
        yield
