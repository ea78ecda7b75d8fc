"""`_tf/storage` where TensorFlow's `gs://` does what a disk does not.

On the fake of storage_server.py. What TensorFlow hides (listings in pages,
uploads that are cut) is its own; `test_gs_paths.py` runs a whole job on it.
"""

import time

import pytest
import tensorflow as tf
from small_models import logistic

from tests.storage_server import Running
from tfdist._tf import storage
from tfdist.checkpoint import checkpoints
from tfdist.estimator import results
from tfdist.estimator.saved_models import export_saved_model, list_exports
from tfdist.vertex.exports import check_export_dir, copy_export

gfile = tf.io.gfile
BUCKET = "gs://bucket"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with a bucket."""
    directory = tmp_path_factory.mktemp("server")
    running = Running(directory)
    (directory / "storage" / "bucket").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running
    running.close()


@pytest.fixture
def folder(server, request):
    """A folder of a test's own, in which there is nothing."""
    name = "".join(c for c in request.node.name if c.isalnum())
    return f"{BUCKET}/{name}"


def write(path, content, mode="wb"):
    with gfile.GFile(path, mode) as file:
        file.write(content)


def read(path):
    with gfile.GFile(path, "rb") as file:
        return file.read()


def names_in(server, folder):
    """What is stored in a folder."""
    prefix = folder.removeprefix(f"{BUCKET}/") + "/"
    names = server.store.names("bucket", prefix)
    return [name.removeprefix(prefix) for name in names]


def requests_of(server, act):
    """The requests that `act` makes, without TensorFlow's parameters."""
    before = len(server.requests())
    act()
    return [line.partition("?")[0] for line in server.requests()[before:]]


# --- Files -------------------------------------------------------------------


@pytest.mark.parametrize("now", [b"1", b"12345678"])
def test_a_file_that_was_replaced_is_read_whole(server, folder, now):
    """TensorFlow's own way knows the size that it had a moment ago."""
    name = folder.removeprefix(f"{BUCKET}/")
    server.store.write("bucket", name, b"1234")
    assert storage.read_text(folder) == "1234"
    server.store.write("bucket", name, now)
    assert storage.read_text(folder) == now.decode()


def test_why_the_size_is_not_asked_for(server, folder):
    """As soon as this fails, `storage.read_text` is not needed any more."""
    name = folder.removeprefix(f"{BUCKET}/")
    server.store.write("bucket", name, b"1234")
    assert read(folder) == b"1234"
    server.store.write("bucket", name, b"12345678")
    assert read(folder) == b"1234"


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1])
def test_text_of_any_size(tmp_path, size):
    path = tmp_path / "file"
    path.write_text("x" * size)
    assert storage.read_text(str(path)) == "x" * size
    assert storage.read_text(str(tmp_path / "absent")) is None


def test_json_on_a_store(server, folder):
    for value in ({"a": 1}, {"a": "a longer one"}, {}):
        results.write_json(f"{folder}/result.json", value)
        assert results.read_json(f"{folder}/result.json") == value
    assert results.read_json(f"{folder}/absent.json") is None
    assert names_in(server, folder) == ["result.json"]


# --- Folders -----------------------------------------------------------------


def test_a_missing_bucket_is_named():
    """TensorFlow would look for its parent for ever."""
    with pytest.raises(
        tf.errors.NotFoundError, match=r"bucket .* does not exist"
    ):
        storage.make_directory("gs://no-such-bucket/folder")


def test_a_folder_that_only_a_shell_knows(tmp_path, monkeypatch):
    """Bash makes a home of `--flag ~/x`, but not of `--flag=~/x`."""
    monkeypatch.chdir(tmp_path)
    for act in storage.make_directory, storage.check_writable:
        with pytest.raises(ValueError, match="begins with ~"):
            act("~/model")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_removed_though_the_first_look_fails(server, folder):
    for name in ("a", "b/c"):
        write(f"{folder}/{name}", b"")
    server.plan(("503", "^GET .*prefix=.*maxResults=1"))
    seen = requests_of(server, lambda: storage.remove_tree(folder))
    assert seen[0].startswith("503 503")
    assert names_in(server, folder) == []


def test_why_a_folder_needs_a_second_look(server, folder):
    """As soon as this fails, `storage.remove_tree` is not needed any more."""
    write(f"{folder}/a", b"")
    server.plan(("503", "^GET .*prefix=.*maxResults=1"))
    with pytest.raises(tf.errors.NotFoundError):
        gfile.rmtree(folder)
    assert names_in(server, folder) == ["a"]


def test_an_absent_folder_is_not_removed(server, folder, tmp_path):
    """Nor one whose name begins like it."""
    write(f"{folder}-other/a", b"")
    storage.remove_tree(folder)
    assert names_in(server, f"{folder}-other") == ["a"]
    (tmp_path / "absent-other").mkdir()
    storage.remove_tree(str(tmp_path / "absent"))
    assert (tmp_path / "absent-other").exists()


def test_writable(server, folder, tmp_path):
    storage.check_writable(folder)
    assert names_in(server, folder) == [""]
    storage.check_writable(str(tmp_path / "a" / "b"))
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_not_writable(server, tmp_path):
    with pytest.raises(ValueError, match="gcloud storage buckets create"):
        storage.check_writable("gs://no-such-bucket/job")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^model_dir .* cannot be written"):
        storage.check_writable(str(tmp_path / "file" / "job"))
    with pytest.raises(ValueError, match=r"^export_dir .* cannot be written"):
        check_export_dir(str(tmp_path / "file" / "model/"))


@pytest.mark.parametrize(
    ("error", "path", "expected"),
    [
        (
            tf.errors.PermissionDeniedError,
            "gs://b/job",
            {"response code 401": "gcloud auth", "response code 403": "role"},
        ),
        (
            tf.errors.FailedPreconditionError,
            "gs://b/job",
            {"libcurl code 6 meaning": "--network=host", "another": ""},
        ),
        (
            tf.errors.AbortedError,
            "gs://b/job",
            {"All 10 retry attempts failed": "does not answer"},
        ),
        (tf.errors.NotFoundError, "/a/job", {"response code 404": ""}),
    ],
)
def test_advice(error, path, expected):
    for message, advice in expected.items():
        found = storage.advice(path, error(None, None, message))
        assert advice in found
        assert bool(advice) == bool(found)


# --- Checkpoints and exports where folders are not renamed -------------------


@pytest.mark.parametrize("where", ["gs", "disk"])
def test_a_list_of_checkpoints_that_cannot_be_read(
    server, folder, tmp_path, where
):
    """A job would begin anew, and overwrite what is there."""
    directory = folder if where == "gs" else str(tmp_path)
    assert checkpoints.latest(directory) is None
    write(f"{directory}/checkpoint", b"model_checkpoint_path: 'cut off")
    jobs = checkpoints.Checkpoints(directory, {"v": tf.Variable(1.0)})
    for act in (jobs.restore, lambda: checkpoints.latest(directory)):
        with pytest.raises(ValueError, match="To start over, move"):
            act()


def test_an_export_that_fails_in_the_middle(monkeypatch):
    """Part of its files have moved; none of them stays."""
    base, moved = "ram://storage/failed", []
    rename = gfile.rename

    def fail(source, target):
        if len(moved) == 2:
            raise tf.errors.AbortedError(None, None, "as an outage")
        moved.append(target)
        rename(source, target)

    monkeypatch.setattr(gfile, "rename", fail)
    with pytest.raises(tf.errors.AbortedError, match="as an outage"):
        export_saved_model(logistic(), base)
    assert len(moved) == 2
    assert gfile.listdir(base) == []


@pytest.mark.slow
def test_an_export_is_copied(server, folder):
    export = export_saved_model(logistic(), f"{folder}/export")
    for _ in "12":  # As a job that was started again.
        copy_export(export, f"{folder}/model/")
    number = export.rpartition("/")[2]
    names = [n for n in names_in(server, folder) if not n.endswith("/")]
    exported, model = (
        {n.removeprefix(part) for n in names if n.startswith(part)}
        for part in (f"export/{number}/", "model/")
    )
    assert model == exported
    assert "//" not in "".join(names)


def test_an_export_of_a_process_that_died():
    """In the middle: it is no export, and goes after an hour."""
    base = "ram://storage/died"
    old, recent = "1700000000", f"{int(time.time()) - 60:010}"
    for name in (old, recent):
        gfile.makedirs(f"{base}/{name}")
        write(f"{base}/{name}/fingerprint.pb", b"")
    assert list_exports(base) == []
    path = export_saved_model(logistic(), base)
    assert list_exports(base) == [path]
    left = [recent, path.rpartition("/")[2]]
    assert sorted(gfile.listdir(base)) == left
