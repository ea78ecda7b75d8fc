"""TensorFlow's `gs://` on the fake of storage_server.py, and `_tf/storage`."""

import json
import ssl
import time
import urllib.request

import numpy as np
import pytest
import tensorflow as tf
from small_models import logistic

from tests import storage_server
from tests.storage_server import Faults, Running
from tfdist._tf import storage
from tfdist.checkpoint import checkpoints
from tfdist.estimator import results
from tfdist.estimator.saved_models import export_saved_model, list_exports

gfile = tf.io.gfile
BUCKET = "gs://bucket"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with a bucket; four names fit in a page of a listing."""
    directory = tmp_path_factory.mktemp("server")
    running = Running(directory, "--page_size=4")
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


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_what_is_written_is_read(server, folder, size):
    content = np.random.default_rng(0).bytes(size)
    write(f"{folder}/file", content)
    assert read(f"{folder}/file") == content
    assert gfile.stat(f"{folder}/file").length == size
    assert names_in(server, folder) == ["file"]


def test_parts_are_read(folder):
    write(f"{folder}/file", b"0123456789")
    with gfile.GFile(f"{folder}/file", "rb") as file:
        file.seek(3)
        assert file.read(4) == b"3456"
        assert file.read() == b"789"
        assert file.read() == b""


def test_append(folder):
    for text in (b"one ", b"two ", b"three"):
        write(f"{folder}/file", text, "ab")
    assert read(f"{folder}/file") == b"one two three"


def test_names_are_escaped(server, folder):
    name = "a b/%2F?x=1&y=ü.txt"
    write(f"{folder}/{name}", b"content")
    assert names_in(server, folder) == [name]
    assert read(f"{folder}/{name}") == b"content"


def test_what_is_not_there(folder):
    for act in (read, gfile.stat, gfile.remove, gfile.listdir, gfile.rmtree):
        with pytest.raises(tf.errors.NotFoundError):
            act(f"{folder}/file")
    assert not gfile.exists(f"{folder}/file")
    assert not gfile.exists("gs://no-such-bucket")
    with pytest.raises(tf.errors.NotFoundError, match="bucket does not exist"):
        storage.make_directory("gs://no-such-bucket/folder")


def test_a_double_slash_is_another_object(server, folder):
    write(f"{folder}/a/b", b"one")
    write(f"{folder}/a//b", b"two")
    assert names_in(server, folder) == ["a//b", "a/b"]
    assert read(f"{folder}/a/b") == b"one"


# --- Folders -----------------------------------------------------------------


def test_listings_of_several_pages(folder):
    names = [f"{i:02}" for i in range(9)]
    for name in names:
        write(f"{folder}/a/{name}", b"")
    write(f"{folder}/b/c/d", b"")
    write(f"{folder}/z", b"")
    assert gfile.listdir(folder) == ["z", "a/", "b/"]
    assert gfile.listdir(f"{folder}/a") == names
    assert gfile.glob(f"{folder}/*/0[1-3]") == [
        f"{folder}/a/{name}" for name in names[1:4]
    ]
    assert gfile.glob(f"{folder}/b*") == [f"{folder}/b"]
    assert len(list(gfile.walk(folder))) == 4
    assert gfile.isdir(f"{folder}/b/c")
    assert not gfile.isdir(f"{folder}/z")


def test_folders_are_made_and_removed(server, folder):
    gfile.makedirs(f"{folder}/a/b")
    assert names_in(server, folder) == ["", "a/", "a/b/"]
    assert gfile.isdir(f"{folder}/a/b")
    write(f"{folder}/a/b/c", b"")
    gfile.rmtree(f"{folder}/a")
    assert not gfile.exists(f"{folder}/a")
    assert names_in(server, folder) == [""]


def test_rename(server, folder):
    write(f"{folder}/a", b"a")
    write(f"{folder}/b", b"b")
    with pytest.raises(tf.errors.AlreadyExistsError):
        gfile.rename(f"{folder}/a", f"{folder}/b")
    gfile.rename(f"{folder}/a", f"{folder}/b", overwrite=True)
    assert read(f"{folder}/b") == b"a"
    gfile.rename(folder, f"{folder}-moved")
    assert names_in(server, folder) == []
    assert names_in(server, f"{folder}-moved") == ["b"]


@pytest.mark.slow
def test_checkpoints(server, folder):
    """Of 20 MB; the newest one is kept."""
    values = np.random.default_rng(0).normal(size=[5_000_000])
    variable = tf.Variable(values.astype("float32"))
    checkpoint = tf.train.Checkpoint(variable=variable)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=1)
    manager.save()
    variable.assign_add(tf.ones_like(variable))
    manager.save()
    saved = variable.numpy()
    variable.assign(tf.zeros_like(variable))
    path = tf.train.latest_checkpoint(folder)
    assert path == f"{folder}/ckpt-2"
    tf.train.Checkpoint(variable=variable).restore(path)
    np.testing.assert_array_equal(variable, saved)
    names = names_in(server, folder)
    assert [name for name in names if name.startswith("ckpt")] == [
        "ckpt-2.data-00000-of-00001",
        "ckpt-2.index",
    ]


# --- Faults ------------------------------------------------------------------


def test_an_upload_that_is_cut_goes_on(server, folder):
    """From where it was, as the answer 308 says."""
    content = np.random.default_rng(0).bytes(3_000_000)
    server.plan(("cut", "^PUT"))
    seen = requests_of(server, lambda: write(f"{folder}/file", content))
    path = "/upload/storage/v1/b/bucket/o"
    assert seen == [
        f"200 - POST {path}",
        f"0 cut PUT {path}",
        f"308 - PUT {path}",
        f"200 - PUT {path}",
    ]
    assert read(f"{folder}/file") == content


WRITE, READ, RENAME, REMOVE, LIST = "write", "read", "rename", "remove", "list"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["503", "cut"])
@pytest.mark.parametrize(
    ("act", "pattern"),
    [
        (WRITE, "^POST .*uploadType=resumable"),
        (READ, "^GET /bucket/"),
        (READ, "^GET .*fields=size"),
        (RENAME, "rewriteTo"),
        (RENAME, "^DELETE"),
        (REMOVE, "^DELETE"),
        (LIST, "^GET .*prefix="),
    ],
)
def test_tensorflow_repeats_what_fails(server, folder, act, pattern, kind):
    acts = {
        WRITE: lambda: write(f"{folder}/b", b"b"),
        READ: lambda: read(f"{folder}/a"),
        RENAME: lambda: gfile.rename(f"{folder}/a", f"{folder}/b"),
        REMOVE: lambda: gfile.remove(f"{folder}/a"),
        LIST: lambda: gfile.listdir(folder),
    }
    server.store.write("bucket", f"{folder.rpartition('/')[2]}/a", b"a")
    server.plan((kind, pattern))
    seen = requests_of(server, acts[act])
    assert sum(f" {kind} " in line for line in seen) == 1
    left = {WRITE: ["a", "b"], RENAME: ["b"], REMOVE: []}
    assert names_in(server, folder) == left.get(act, ["a"])


def test_random_faults_are_those_of_the_seed():
    def faults(seed):
        source = Faults(rate=0.05, seed=seed)
        return [source.next("GET /") for _ in range(2000)]

    assert faults(1) == faults(1) != faults(2)
    assert sum(fault is not None for fault in faults(1)) in range(70, 130)
    assert {*faults(1)} == {None, *Faults.kinds}


# --- The service itself ------------------------------------------------------


@pytest.fixture
def call(server):
    """A request without TensorFlow; status and JSON of the answer."""
    trusted = ssl.create_default_context(
        cafile=server.environment["CURL_CA_BUNDLE"]
    )
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler(
            {"https": server.environment["HTTPS_PROXY"]}
        ),
        urllib.request.HTTPSHandler(context=trusted),
    )

    def call(method, path, token=storage_server.TOKEN):
        request = urllib.request.Request(
            f"https://{storage_server.HOSTS[0]}{path}", method=method
        )
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with opener.open(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    return call


@pytest.mark.parametrize("token", [None, "another"])
def test_who_is_unknown_is_refused(call, token):
    status, answer = call("GET", "/storage/v1/b/bucket", token)
    assert status == 401
    assert answer["error"]["code"] == 401


def test_generations_grow(server, call):
    seen = []
    for content in (b"one", b"three"):
        server.store.write("bucket", "generation", content)
        _, answer = call("GET", "/storage/v1/b/bucket/o/generation")
        seen.append((int(answer["generation"]), int(answer["size"])))
    assert seen[0] < seen[1]
    assert [size for _, size in seen] == [3, 5]


@pytest.fixture
def slow_copies(server, tmp_path, monkeypatch):
    """A server that copies four bytes a call."""
    running = Running(tmp_path, "--rewrite_bytes=4")
    (tmp_path / "storage" / "bucket").mkdir()
    running.store.write("bucket", "file", b"0123456789")
    monkeypatch.setenv("HTTPS_PROXY", running.environment["HTTPS_PROXY"])
    monkeypatch.setenv("CURL_CA_BUNDLE", running.environment["CURL_CA_BUNDLE"])
    monkeypatch.setitem(
        server.environment, "HTTPS_PROXY", running.environment["HTTPS_PROXY"]
    )
    monkeypatch.setitem(
        server.environment,
        "CURL_CA_BUNDLE",
        running.environment["CURL_CA_BUNDLE"],
    )
    yield running
    running.close()


def test_a_copy_of_several_calls(slow_copies, call):
    path, token = "/storage/v1/b/bucket/o/file/rewriteTo/b/bucket/o/copy", ""
    for done in ("4", "8", "10"):
        assert "copy" not in slow_copies.store.names("bucket")
        _, answer = call("POST", f"{path}?rewriteToken={token}")
        assert answer["totalBytesRewritten"] == done
        token = answer.get("rewriteToken")
    assert answer["done"]
    assert not token
    assert slow_copies.store.read("bucket", "copy") == b"0123456789"


def test_tensorflow_copies_in_one_call_alone(slow_copies):
    """It has no loop for more: a bucket's objects need one location."""
    with pytest.raises(tf.errors.UnimplementedError, match="large files"):
        gfile.rename(f"{BUCKET}/file", f"{BUCKET}/copy")
    assert slow_copies.store.names("bucket") == ["file"]


# --- tfdist._tf.storage ------------------------------------------------------


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
    storage.remove_tree(folder)
    storage.remove_tree(str(tmp_path / "absent"))


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
        with pytest.raises(ValueError, match="to train anew, move"):
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
