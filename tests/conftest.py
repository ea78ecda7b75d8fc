import tempfile

import pytest


@pytest.fixture(autouse=True, scope="session")
def _temporary_files(tmp_path_factory):
    """Also what libraries forget in the system's folder goes with the tests."""
    tempfile.tempdir = str(tmp_path_factory.mktemp("temporary"))
    yield
    tempfile.tempdir = None
