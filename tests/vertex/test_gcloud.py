"""The real gcloud, against a service on loopback; docker is a stub.

What gcloud would send or build is kept, and the steps of a Dockerfile are
replayed in an empty directory.
"""

import contextlib
import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
import yaml
from google.cloud.aiplatform_v1.types import (
    CustomJobSpec,
    HyperparameterTuningJob,
)
from google.protobuf import json_format
from pace import slow_but

from tfdist.vertex import command

ROOT = Path(__file__).parents[2]
COMMON = [
    "--image=us-central1-docker.pkg.dev/my-project/tfdist/trainer:1",
    "--base_output_dir=gs://my-bucket/clicks",
]
needs_gcloud = pytest.mark.skipif(
    shutil.which("gcloud") is None, reason="gcloud is not installed"
)


class Service(http.server.BaseHTTPRequestHandler):
    """Answers as Vertex AI and Cloud Build do to what they accept."""

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(length))
        path = self.path.partition("?")[0]
        self.server.requests.append((path, body))
        answer = {**body, "name": f"{path[4:]}/7", "state": "JOB_STATE_PENDING"}
        if path.endswith("/builds"):
            kind = "google.devtools.cloudbuild.v1.BuildOperationMetadata"
            build = {**body, "id": "7", "projectId": "fake"}
            answer = {
                "name": "operations/7",
                "metadata": {
                    "@type": f"type.googleapis.com/{kind}",
                    "build": build,
                },
            }
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(handler=Service):
    """A service on loopback; its `requests` are (path, body)."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.requests = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def run_gcloud(directory, command, server=None, path=None):
    """Runs a line of shell with gcloud bound to a service on loopback."""
    url = f"http://127.0.0.1:{server.server_port if server else 1}/"
    credentials = directory / "credentials.json"
    credentials.write_text(
        '{"type": "authorized_user", "client_id": "a", "client_secret": "b", '
        '"refresh_token": "c"}'
    )
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env={
            "PATH": f"{path}:{os.environ['PATH']}"
            if path
            else os.environ["PATH"],
            "HOME": str(directory),
            "GOOGLE_APPLICATION_CREDENTIALS": str(credentials),
            "CLOUDSDK_CONFIG": str(directory / "config"),
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_PROJECT": "fake",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM": url,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBUILD": url,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def submit_line(text):
    """The command in a job file's comments."""
    lines = text.partition("# Submit it with:\n")[2].splitlines()
    lines = [line for line in lines if line.startswith("#  ")]
    return "\n".join(line.lstrip("# ") for line in lines)


def as_proto(kind, value):
    return json_format.ParseDict(value, kind.pb(kind()))


# --- Submitting --------------------------------------------------------------

GPU = ["--machine=a2-highgpu-1g", "--accelerator=NVIDIA_TESLA_A100"]
TUNING = [
    *["--metric=auc", "--parameter=learning_rate=double:0.01:1:log"],
    "--parameter=hidden_units=categorical:64|128,64",
]

JOBS = {
    "ps": ["--workers=2", "--ps=1", "--evaluator", "--env=A=b c", "--spot"],
    "a pool left out": ["--workers=1", "--evaluator", *GPU],
    "reduction servers": ["--workers=1", *GPU, "--reduction_servers=2"],
    "tuning": [*TUNING, "--workers=1", "--evaluator"],
}
ARGS = ["--", "--train_files=gs://b/a b*.csv,c", "--message=it's: #1"]


@needs_gcloud
@pytest.mark.parametrize("name", slow_but(["ps"], JOBS))
def test_gcloud_submits_what_the_file_says(tmp_path, capsys, name):
    command.main([*COMMON, "--name=my job", *JOBS[name], *ARGS])
    text = capsys.readouterr().out
    (tmp_path / "job.yaml").write_text(text)
    with serving() as server:
        run_gcloud(tmp_path, submit_line(text), server)
    ((path, body),) = server.requests
    expected = yaml.safe_load(text)
    assert body["displayName"] == "my job"
    if name == "tuning":
        assert path.endswith("/us-central1/hyperparameterTuningJobs")
        kind, sent = HyperparameterTuningJob, body
    else:
        assert path.endswith(
            "/v1/projects/fake/locations/us-central1/customJobs"
        )
        kind, sent = CustomJobSpec, body["jobSpec"]
    assert as_proto(kind, sent) == as_proto(kind, expected)


@needs_gcloud
@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "vertex").glob("*.yaml")),
    ids=lambda path: path.name,
)
def test_gcloud_accepts_the_shipped_files(tmp_path, path):
    text = path.read_text()
    shutil.copy(path, tmp_path / "job.yaml")
    command = submit_line(text) or (
        "gcloud builds submit --no-source --async --config=job.yaml "
        "--substitutions=_IMAGE=us-central1-docker.pkg.dev/p/tfdist/trainer"
    )
    with serving() as server:
        run_gcloud(tmp_path, command, server)
    assert len(server.requests) == 1


# --- Packaging ---------------------------------------------------------------

STUB = """#!/bin/sh
if [ "$1" = build ]; then cat > "$(dirname "$0")/Dockerfile"; fi
printf '%s\\n' "$*" >> "$(dirname "$0")/calls"
"""


@pytest.fixture
def docker(tmp_path):
    """A folder for PATH whose `docker` keeps what it is told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "docker").write_text(STUB)
    (folder / "docker").chmod(0o755)
    return folder


def autopackaged(tmp_path, docker):
    """The Dockerfile that `gcloud ai custom-jobs local-run` makes."""
    run_gcloud(
        tmp_path,
        "gcloud ai custom-jobs local-run --executor-image-uri=python:3.11-slim "
        f"--local-package-path={ROOT} --python-module=trainer.task "
        "--extra-dirs=tfdist --output-image-uri=gcr.io/fake/trainer:1 "
        "--requirements=tensorflow-datasets,importlib-resources "
        "-- --max_steps=5",
        path=docker,
    )
    build, run = (docker / "calls").read_text().splitlines()
    assert build.endswith(f"-f- {ROOT}")
    assert run.endswith("gcr.io/fake/trainer:1 --max_steps=5")
    return (docker / "Dockerfile").read_text()


@needs_gcloud
@pytest.mark.slow
def test_create_packages_for_all_pools(tmp_path, docker, capsys):
    """As vertex/README.md has it: flags for the pools, a file for the rest."""
    flags = ["--workers=2", "--ps=1", "--spot", *COMMON]
    command.main(flags)
    (tmp_path / "job.yaml").write_text(capsys.readouterr().out)
    image = "gcr.io/fake/trainer:1"
    pool = "--worker-pool-spec=machine-type=n1-standard-4,replica-count"
    with serving() as server:
        run_gcloud(
            tmp_path,
            "gcloud ai custom-jobs create --region=us-central1 "
            f"--display-name=n --config=job.yaml '{pool}=1,"
            f"executor-image-uri=python:3.11-slim,local-package-path={ROOT},"
            "python-module=trainer.task,extra-dirs=tfdist,"
            "requirements=tensorflow-datasets;importlib-resources,"
            f"output-image-uri={image}' {pool}=2 {pool}=1 --args=--max_steps=5",
            server,
            path=docker,
        )
    ((_, body),) = server.requests
    spec = body["jobSpec"]
    assert [
        (pool["replicaCount"], pool["containerSpec"])
        for pool in spec["workerPoolSpecs"]
    ] == [
        (n, {"imageUri": image, "args": ["--max_steps=5"]})
        for n in ("1", "2", "1")
    ]
    assert spec["scheduling"] == {"strategy": "SPOT"}
    copied = [
        json.loads(rest)[0]
        for name, rest in instructions((docker / "Dockerfile").read_text())
        if name == "COPY"
    ]
    assert copied == ["./setup.py", "tfdist", "trainer"]
    *_, push = (docker / "calls").read_text().splitlines()
    assert push == f"push {image}"


def instructions(dockerfile):
    """(instruction, arguments) of each step, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.MULTILINE)
    for line in text.replace("\\\n", "").splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name, rest.strip()


class Replay:
    """Carries out a Dockerfile in a folder and a fresh virtual environment.

    Absolute paths of the image lie in the folder. The environment sees the
    packages of this one, so that pip finds the requirements fulfilled.
    """

    def __init__(self, folder):
        self.root = folder / "image"
        self.root.mkdir()
        environment = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        python = environment / "bin" / "python"
        paths = subprocess.run(
            [
                python,
                "-c",
                "import sysconfig as s; print(s.get_path('purelib'))",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        here = sysconfig.get_path("purelib")
        Path(paths, "these.pth").write_text(f"{here}\n")
        self.environment = {
            "PATH": f"{environment / 'bin'}:/usr/bin:/bin",
            "HOME": str(folder),
            "PIP_NO_INDEX": "1",
            # Means: without isolation, for which an index is needed.
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        self.workdir = self.root
        self.entrypoint = []

    def inside(self, path):
        return self.root / path.lstrip("/")

    def run(self, command, **options):
        return subprocess.run(
            command,
            cwd=self.workdir,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            timeout=240,
            **options,
        )

    def build(self, dockerfile, context):
        for name, rest in instructions(dockerfile):
            getattr(self, f"on_{name.lower()}")(rest, context)

    def on_from(self, rest, _):
        assert rest.startswith("python:3.11")

    def on_arg(self, rest, _):
        self.on_env(rest, _)

    def on_env(self, rest, _):
        values = dict(word.split("=", 1) for word in shlex.split(rest))
        values.pop("HOME", None)  # A folder of the real machine.
        self.environment.update(values)

    def on_workdir(self, rest, _):
        self.workdir = self.inside(rest)
        self.workdir.mkdir(parents=True, exist_ok=True)

    def on_run(self, rest, _):
        rest = re.sub(
            r"(?<=\s)/(?=(usr/app|home|etc|var)\b)", f"{self.root}/", rest
        )
        self.run(["sh", "-c", rest], check=True)

    def on_copy(self, rest, context):
        paths = json.loads(rest) if rest.startswith("[") else rest.split()
        source, target = Path(context, paths[0]), self.workdir / paths[1]
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, ignore=ignore)
        else:
            shutil.copy(source, target)

    def on_user(self, rest, _):
        assert rest == "1000:1000"

    def on_entrypoint(self, rest, _):
        self.entrypoint = json.loads(rest)


def shows_its_flags(run, *command):
    """Whether the trainer starts: its flags, from the code in the image."""
    done = run([*command, "--help"], capture_output=True, text=True)
    return "--model_dir" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param("gcloud", marks=needs_gcloud), "vertex/Dockerfile"]
)
def test_replayed_dockerfile_has_a_trainer(tmp_path, docker, kind):
    if kind == "gcloud":
        dockerfile = autopackaged(tmp_path, docker)
    else:
        dockerfile = (ROOT / kind).read_text()
    image = Replay(tmp_path)
    image.build(dockerfile, ROOT)
    code = "import tfdist, trainer; print(tfdist.__file__, trainer.__file__)"
    where = image.run(
        ["python", "-c", code], capture_output=True, text=True
    ).stdout.split()
    assert where == [
        str(image.workdir / package / "__init__.py")
        for package in ("tfdist", "trainer")
    ]
    assert shows_its_flags(image.run, *image.entrypoint)


def installed(folder, *sources):
    """Installs packages from copies of their sources, one after the other."""
    target = folder / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
    for i, source in enumerate(sources):
        copy = folder / f"source-{i}"
        ignore = shutil.ignore_patterns(
            "__pycache__", ".*", "notebooks", "*.egg-info", "build", "dist"
        )
        shutil.copytree(source, copy, ignore=ignore)
        options = ["--no-build-isolation", "--no-index", f"--target={target}"]
        subprocess.run([*pip, *options, copy], check=True)
        shutil.rmtree(copy)
    return target


@pytest.mark.slow
def test_packages_have_a_trainer(tmp_path):
    """tfdist and the example, as job files for packages bring them."""
    target = installed(tmp_path, ROOT, ROOT / "trainer")

    def run(command, **options):
        environment = {**os.environ, "PYTHONPATH": str(target)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, timeout=240, **options
        )

    assert (target / "tfdist" / "__init__.pyi").exists()
    assert (target / "tfdist" / "MIGRATION.md").exists()
    assert shows_its_flags(run, sys.executable, "-m", "trainer.task")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["tfdist", "trainer"])
def test_installed_beside_the_users_own_trainer(tmp_path, first):
    own = tmp_path / "own"
    (own / "trainer").mkdir(parents=True)
    (own / "trainer" / "__init__.py").touch()
    (own / "trainer" / "task.py").write_text("print('own')")
    (own / "setup.py").write_text(
        "from setuptools import setup\n"
        "setup(name='clicks', version='1', packages=['trainer'])"
    )
    sources = [ROOT, own] if first == "tfdist" else [own, ROOT]
    target = installed(tmp_path, *sources)
    assert (target / "tfdist" / "__init__.py").exists()
    done = subprocess.run(
        [sys.executable, "-m", "trainer.task"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "own\n", done.stderr


def test_dockerignore_keeps_what_an_image_needs():
    patterns = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    kept = {"setup.py", "tfdist", "trainer", "requirements.txt", "conf"}
    for pattern in patterns:
        assert not any(Path(name).match(pattern) for name in kept)
    assert {".git", "tests", "**/__pycache__"} <= set(patterns)
