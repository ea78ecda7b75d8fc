"""A fake of Google Cloud Storage, for TensorFlow's own `gs://` file system.

    python -m tests.storage_server DIRECTORY --certificate=FILE [--port=...]

TensorFlow has no setting for another storage service. It honours a proxy
(`HTTPS_PROXY`) and a certificate authority (`CURL_CA_BUNDLE`): this server is
the proxy, and instead of passing a connection on, it answers in the name of
`www.googleapis.com` and `storage.googleapis.com` with a certificate of the
test's own authority. It speaks the part of the JSON API that TensorFlow uses.

Buckets are the folders of DIRECTORY, objects the files in them, with quoted
names: what one server stores, another one and the test itself can read.

Faults are injected before or while a request is served, as planned by
`POST /faults` (a JSON list of `[kind, pattern]`, each for the next request
that matches "METHOD path") or at random, by `--fault_rate` and `--seed`:

* "503": nothing is done.
* "slow": it takes `SLOW_SECS` longer.
* "cut": the connection breaks. Of an upload half the body has arrived; of
  everything else the work is done, and half of the answer is sent.

Each request is a line of the output: its status, its fault or "-", its method
and its path. It listens on the loopback interface alone.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import datetime
import functools
import http.server
import itertools
import json
import os
import random
import re
import ssl
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

import trustme

HOSTS = ("www.googleapis.com", "storage.googleapis.com")
TOKEN = "a-token-for-tests"
SLOW_SECS = 0.3
_PAGE_SIZE = 1000  # The most names in one answer.


class Answer(Exception):
    """Ends a request that cannot be served as it is."""

    def __init__(self, status, message="", **headers):
        super().__init__(message)
        error = {"error": {"code": status, "message": message}}
        self.status = status
        self.body = json.dumps(error).encode() if message else b""
        self.headers = headers


class Store:
    """The objects, on disk."""

    def __init__(self, directory):
        self._directory = Path(directory)
        self._uploads = self._directory / ".uploads"
        self._uploads.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count()

    def check_bucket(self, bucket):
        if bucket.startswith(".") or not (self._directory / bucket).is_dir():
            raise Answer(404, "The specified bucket does not exist.")

    def names(self, bucket, prefix=""):
        self.check_bucket(bucket)
        names = map(urllib.parse.unquote, os.listdir(self._directory / bucket))
        return sorted(name for name in names if name.startswith(prefix))

    def read(self, bucket, name):
        self.check_bucket(bucket)
        try:
            return self._path(bucket, name).read_bytes()
        except FileNotFoundError:
            raise _no_such_object(bucket, name) from None

    def write(self, bucket, name, content, only_new=False):
        """Replaces an object at once, as the service does."""
        self.check_bucket(bucket)
        temporary = self._uploads / f"{os.getpid()}-{next(self._numbers)}"
        temporary.write_bytes(content)
        path = self._path(bucket, name)
        try:
            if only_new:
                os.link(temporary, path)
                temporary.unlink()
            else:
                temporary.replace(path)
        except FileExistsError:
            temporary.unlink()
            raise Answer(412, "The object exists.") from None

    def delete(self, bucket, name):
        self.check_bucket(bucket)
        try:
            self._path(bucket, name).unlink()
        except FileNotFoundError:
            raise _no_such_object(bucket, name) from None

    def metadata(self, bucket, name):
        self.check_bucket(bucket)
        try:
            stat = self._path(bucket, name).stat()
        except FileNotFoundError:
            raise _no_such_object(bucket, name) from None
        updated = datetime.datetime.fromtimestamp(
            stat.st_mtime_ns // 1_000_000 / 1000, datetime.UTC
        )
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "size": str(stat.st_size),
            "generation": str(stat.st_mtime_ns),
            "updated": updated.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }

    def _path(self, bucket, name):
        quoted = urllib.parse.quote(name, safe="")
        return self._directory / bucket / quoted


def _no_such_object(bucket, name):
    return Answer(404, f"No such object: {bucket}/{name}")


class Faults:
    """Which request meets which fault: those planned, and some at random."""

    kinds = ("503", "slow", "cut")

    def __init__(self, rate=0.0, seed=0):
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._rate = rate
        self._planned = []

    def plan(self, faults):
        with self._lock:
            self._planned.extend(faults)

    def next(self, request):
        """The fault of a request, such as "GET /storage/v1/b/bucket"."""
        with self._lock:
            for fault in self._planned:
                if re.search(fault[1], request):
                    self._planned.remove(fault)
                    return fault[0]
            if self._random.random() < self._rate:
                return self._random.choice(self.kinds)
        return None


class Server(http.server.ThreadingHTTPServer):
    """The proxy that is the service; `port` 0 takes a free one.

    Args:
        store: The objects.
        certificate: File of the certificate and its key, PEM.
        port: Where to listen.
        faults: To be injected.
        page_size: The most names in a listing.
        rewrite_bytes: The most that one call copies, as between locations.
        latency_secs: How long each request waits before it is served.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        store,
        certificate,
        port=0,
        faults=None,
        page_size=_PAGE_SIZE,
        rewrite_bytes=None,
        latency_secs=0.0,
    ):
        super().__init__(("127.0.0.1", port), _Handler)
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(certificate)
        self.store = store
        self.faults = faults or Faults()
        self.page_size = page_size
        self.rewrite_bytes = rewrite_bytes
        self.latency_secs = latency_secs
        # Of an id: bucket, name, size, what has arrived; None when all has.
        self.uploads = {}
        self.upload_ids = map(str, itertools.count(1))

    def handle_error(self, request, client_address):
        """A client that breaks a connection is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    host = ""

    def do_CONNECT(self):
        self.host = self.path.partition(":")[0]
        if self.host not in HOSTS:
            self.send_error(502, f"Only {HOSTS} are known here.")
            return
        self.send_response(200)
        self.end_headers()
        self.close_connection = False  # Whatever HTTP the proxy is asked in.
        self.connection = self.server.tls.wrap_socket(
            self.connection, server_side=True
        )
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", buffering=0)

    def finish(self):
        with contextlib.suppress(OSError):
            super().finish()
        self.connection.close()

    def log_message(self, *_):
        """Silent: `_serve` says what there is to say."""

    def do_POST(self):
        if not self.host:
            self._plan_faults()
        else:
            self._serve()

    def do_GET(self):
        self._serve()

    do_PUT = do_DELETE = do_GET

    def _plan_faults(self):
        self.server.faults.plan(json.loads(self._received(None)))
        self.send_response(204)
        self.end_headers()

    def _serve(self):
        path, _, query = self.path.partition("?")
        self.query = dict(urllib.parse.parse_qsl(query))
        fault = self.server.faults.next(f"{self.command} {self.path}")
        try:
            body = self._received(fault)
            if body is None:
                self.close_connection = True
                self._say(0, fault)
                return
            if fault == "503":
                raise Answer(503, "Injected.")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Answer(401, "Anonymous caller or invalid credentials.")
            status, headers, answer = self._routed(path, body)
        except Answer as error:
            status, headers, answer = error.status, error.headers, error.body
        self._say(status, fault)
        self._answer(status, headers, answer, cut=fault == "cut")

    def _say(self, status, fault):
        line = f"{status} {fault or '-'} {self.command} {self.path}\n"
        sys.stdout.write(line)
        sys.stdout.flush()

    def _received(self, fault):
        """The body; None if the connection was cut on its way."""
        time.sleep(self.server.latency_secs)
        if fault == "slow":
            time.sleep(SLOW_SECS)
        length = int(self.headers.get("Content-Length", 0))
        if fault == "cut" and self.command == "PUT" and length:
            with contextlib.suppress(Answer):
                self._store_part(self._body(length // 2))
            return None
        return self._body(length)

    def _body(self, length):
        """The first bytes of the body.

        TensorFlow's curl sends it in chunks, although it knows the length;
        each is its size in a line of its own, itself, and an empty line.
        """
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(length)
        body = bytearray()
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
            if len(body) > length:  # It is to be cut here.
                return bytes(body[:length])
        self.rfile.readline()
        return bytes(body)

    def _answer(self, status, headers, body, cut):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        if cut:
            self.close_connection = True
            if not body:  # Not even the headers arrive.
                return
            body = body[: len(body) // 2]
        self.end_headers()
        self.wfile.write(body)

    def _routed(self, path, body):
        """Status, headers and body of the answer."""
        names = [urllib.parse.unquote(part) for part in path.split("/")[1:]]
        if self.host == "storage.googleapis.com":
            bucket, name = names
            return self._download(self.server.store.read(bucket, name))
        match (self.command, *names):
            case ("GET", "storage", "v1", "b", bucket):
                self.server.store.check_bucket(bucket)
                return _json({"kind": "storage#bucket", "name": bucket})
            case ("GET", "storage", "v1", "b", bucket, "storageLayout"):
                self.server.store.check_bucket(bucket)
                return _json({"kind": "storage#storageLayout"})
            case ("GET", "storage", "v1", "b", bucket, "o"):
                return _json(self._listing(bucket))
            case ("GET", "storage", "v1", "b", bucket, "o", name):
                if self.query.get("alt") == "media":
                    return self._download(self.server.store.read(bucket, name))
                return _json(self.server.store.metadata(bucket, name))
            case ("DELETE", "storage", "v1", "b", bucket, "o", name):
                self.server.store.delete(bucket, name)
                return 204, {}, b""
            case ("POST", "storage", "v1", "b", bucket, "o", name, *target):
                method, _, to_bucket, _, to_name = target  # rewriteTo/b/../o/..
                assert method == "rewriteTo"
                return _json(self._rewrite(bucket, name, to_bucket, to_name))
            case ("POST", "upload", "storage", "v1", "b", bucket, "o"):
                return self._upload(bucket, body)
            case ("PUT", "upload", *_):
                return self._store_part(body)
        raise Answer(404, "Not found: the fake has no such method.")

    def _download(self, content):
        wanted = re.fullmatch(
            r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")
        )
        if not wanted:
            return 200, {}, content
        first, last = map(int, wanted.groups())
        if first >= len(content):
            raise Answer(416, "The requested range cannot be satisfied.")
        part = content[first : last + 1]
        where = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        return 206, {"Content_Range": where}, part

    def _listing(self, bucket):
        prefix = self.query.get("prefix", "")
        delimiter = self.query.get("delimiter")
        found = {}  # Names and prefixes, in order, without repetition.
        for name in self.server.store.names(bucket, prefix):
            head, slash, _ = name[len(prefix) :].partition(delimiter or "\0")
            found[prefix + head + slash if slash else name] = bool(slash)
        after = base64.b64decode(self.query.get("pageToken", "")).decode()
        left = [name for name in found if not after or name > after]
        asked = int(self.query.get("maxResults", self.server.page_size))
        page = left[: min(asked, self.server.page_size)]
        answer = {"kind": "storage#objects"}
        if any(not found[name] for name in page):
            answer["items"] = [
                {"name": name} for name in page if not found[name]
            ]
        if any(found[name] for name in page):
            answer["prefixes"] = [name for name in page if found[name]]
        if len(page) < len(left):
            token = base64.b64encode(page[-1].encode()).decode()
            answer["nextPageToken"] = token
        return answer

    def _rewrite(self, bucket, name, to_bucket, to_name):
        """Copies; a copy of several calls is finished by the last one."""
        store = self.server.store
        content = store.read(bucket, name)
        store.check_bucket(to_bucket)
        done = int(self.query.get("rewriteToken", 0))
        done += self.server.rewrite_bytes or len(content)
        answer = {
            "kind": "storage#rewriteResponse",
            "objectSize": str(len(content)),
            "totalBytesRewritten": str(min(done, len(content))),
            "done": done >= len(content),
        }
        if done < len(content):
            return {**answer, "rewriteToken": str(done)}
        store.write(to_bucket, to_name, content)
        return {**answer, "resource": store.metadata(to_bucket, to_name)}

    def _upload(self, bucket, body):
        """A whole small object, or the beginning of a resumable upload."""
        store, name = self.server.store, self.query["name"]
        store.check_bucket(bucket)
        if self.query["uploadType"] == "media":
            only_new = self.query.get("ifGenerationMatch") == "0"
            store.write(bucket, name, body, only_new=only_new)
            return _json(store.metadata(bucket, name))
        size = int(self.headers["X-Upload-Content-Length"])
        upload_id = next(self.server.upload_ids)
        self.server.uploads[upload_id] = [bucket, name, size, b""]
        location = f"https://{HOSTS[0]}{self.path}&upload_id={upload_id}"
        return 200, {"Location": location}, b""

    def _store_part(self, body):
        """Takes what comes of a resumable upload, or says what has come."""
        store = self.server.store
        upload = self.server.uploads.get(self.query.get("upload_id"))
        if upload is None:
            raise Answer(404, "There is no such upload.")
        bucket, name, size, arrived = upload
        if arrived is None:
            return _json(store.metadata(bucket, name))
        asked = self.headers.get("Content-Range", "bytes */0")
        sent = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)", asked)
        if not sent or int(sent[3]) != size:
            raise Answer(400, f"Wrong Content-Range: {asked}; size {size}.")
        if sent[1] and int(sent[1]) != len(arrived):
            raise Answer(503, f"The next byte is {len(arrived)}: {asked}.")
        if sent[1]:
            upload[3] = arrived = arrived + body
        if len(arrived) == size:
            store.write(bucket, name, arrived)
            upload[3] = None
            return _json(store.metadata(bucket, name))
        there = {"Range": f"bytes=0-{len(arrived) - 1}"} if arrived else {}
        raise Answer(308, **there)


def _json(value):
    return 200, {"Content_Type": "application/json"}, json.dumps(value).encode()


# --- From the side of a test -------------------------------------------------


@functools.cache
def certificate(directory):
    """Makes an authority and a certificate; returns the paths of both."""
    authority = trustme.CA()
    bundle = Path(directory) / "authority.pem"
    own = Path(directory) / "server.pem"
    authority.cert_pem.write_to_path(bundle)
    authority.issue_cert(*HOSTS).private_key_and_cert_chain_pem.write_to_path(
        own
    )
    return bundle, own


def command(directory, own, *flags):
    """What starts a server; `own` is its certificate."""
    return [
        *(sys.executable, "-m", "tests.storage_server", str(directory)),
        *(f"--certificate={own}", *flags),
    ]


def environment(port, bundle):
    """What lets TensorFlow find the server and trust it.

    The retries come sooner than TensorFlow's, which begin after a second; a
    process reads that before it imports TensorFlow.
    """
    return {
        "HTTPS_PROXY": f"http://127.0.0.1:{port}",
        "CURL_CA_BUNDLE": str(bundle),
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": TOKEN,
        "NO_GCE_CHECK": "true",
        "GCS_RETRY_CONFIG_INIT_DELAY_TIME_US": "50000",
        "GCS_RETRY_CONFIG_MAX_DELAY_TIME_US": "1000000",
    }


class Running:
    """A server in a process of its own, until `close`.

    Attributes:
        environment: For processes that are to use it.
        store: The objects.
    """

    def __init__(self, directory, *flags):
        bundle, own = certificate(directory)
        self.store = Store(directory / "storage")
        self._log = directory / "storage.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command(directory / "storage", own, *flags),
                cwd=Path(__file__).parent.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 30
        while not (found := re.match(r"port (\d+)\n", self._log.read_text())):
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, "The server did not start."
            time.sleep(0.02)
        self._port = int(found[1])
        self.environment = environment(self._port, bundle)

    def plan(self, *faults):
        """Each `(kind, pattern)` is for the next request that matches."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/faults",
            data=json.dumps(faults).encode(),
        )
        # No environment's proxy: it is this server.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(request, timeout=30).close()

    def requests(self):
        """`status fault method path` of each request so far."""
        return self._log.read_text().splitlines()[1:]

    def close(self):
        """Ends the process."""
        self._process.terminate()
        self._process.wait(30)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--certificate", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fault_rate", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page_size", type=int, default=_PAGE_SIZE)
    parser.add_argument("--rewrite_bytes", type=int)
    parser.add_argument("--latency_secs", type=float, default=0.0)
    args = parser.parse_args()
    server = Server(
        Store(args.directory),
        args.certificate,
        args.port,
        Faults(args.fault_rate, args.seed),
        args.page_size,
        args.rewrite_bytes,
        args.latency_secs,
    )
    print(f"port {server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
