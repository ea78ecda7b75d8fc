"""docs/howto/vertex_ai.md: its program, and its commands, without a cloud.

`tests/project/test_docs.py` runs the blocks that run anywhere.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from google.cloud.aiplatform_v1.types import (
    DeployModelRequest,
    Endpoint,
    UploadModelRequest,
)

from tests.serving_checks import serve
from tests.vertex.test_cloud_environments import aip_variables
from tests.vertex.test_gcloud import (
    Replay,
    Service,
    as_proto,
    needs_gcloud,
    run_gcloud,
    serving,
)
from tfdist.hooks.events import read_scalars

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "howto" / "vertex_ai.md").read_text()
BLOCKS = re.findall(r"^```(\S+ ?\S*)\n(.*?)^```", TEXT, re.M | re.S)


def block(kind, containing):
    (found,) = (b for k, b in BLOCKS if k == kind and containing in b)
    return found


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What the program leaves in the service's folders."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "trainer").mkdir()
    (folder / "trainer" / "__init__.py").touch()
    program = block("python trainer/task.py", "def main")
    (folder / "trainer" / "task.py").write_text(program)
    environment = {**os.environ, **aip_variables(folder / "out")}
    subprocess.run(
        [sys.executable, "-m", "trainer.task"],
        cwd=folder,
        env={**environment, "PYTHONPATH": f"{folder}:{ROOT}"},
        stdout=subprocess.DEVNULL,
        timeout=200,
        check=True,
    )
    return folder / "out"


@pytest.mark.slow
def test_each_part_of_the_service_finds_its_files(job):
    assert read_scalars(str(job / "logs"))[1000]["loss"] < 0.5
    assert read_scalars(str(job / "logs" / "eval"))[1000]["accuracy"] > 0.9
    assert (job / "checkpoints" / "model.ckpt-1000.index").exists()
    (version,) = sorted((job / "checkpoints/export/serving").iterdir())[-1:]
    assert version.name.isdigit()  # As TensorFlow Serving wants it.
    names = [
        {str(p.relative_to(base)) for p in base.rglob("*") if p.is_file()}
        for base in (version, job / "model")
    ]
    assert names[0] == names[1]


@pytest.mark.slow
def test_the_request_of_curl_is_answered(job):
    body = block("sh elsewhere", "curl").partition("-d '")[2].rstrip("'\n")
    instances = json.loads(body)["instances"]
    columns = {
        name: np.array([one[name] for one in instances], "float32")
        for name in instances[0]
    }
    ((_, outputs),) = serve(job / "model", ("serving_default", columns))
    (predictions,) = outputs.values()
    assert [p > 0.5 for p in predictions.ravel()] == [True, False]


@pytest.mark.slow
def test_the_image_runs_the_program(tmp_path):
    text = block("sh", "cat > Dockerfile")
    dockerfile = text.partition("END'\n")[2].removesuffix("END\n")
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "task.py").touch()
    image = Replay(tmp_path)
    # pip's part is that of test_gcloud.py, with the wheel.
    image.build(
        re.sub(r"^(COPY \*|RUN pip).*\n", "", dockerfile, flags=re.M), tmp_path
    )
    assert (image.workdir / "trainer" / "task.py").exists()
    assert image.entrypoint == ["python", "-m", "trainer.task"]
    assert "\nUSER 1000:1000\n" in dockerfile


MODEL = "projects/1/locations/us-central1/models/12"
ENDPOINT = "projects/1/locations/us-central1/endpoints/34"
# What came of a request, by the end of its path.
RESULTS = {"models:upload": {"model": MODEL}, "endpoints": {"name": ENDPOINT}}


class Finished(Service):
    """Answers every request with an operation that is done."""

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        path = self.path.partition("?")[0]
        body = json.loads(self.rfile.read(length) or b"{}")
        self.server.requests.append((path, body))
        self.answer(self.operation(path))

    def do_GET(self):
        path = self.path.partition("?")[0]
        kind = path.rpartition("/")[2]
        listed = {"displayName": "clicks"}
        if "operations" in path:
            self.answer({"name": path[4:], "done": True, "response": {}})
        elif kind in ("models", "endpoints"):
            name = MODEL if kind == "models" else ENDPOINT
            self.answer({kind: [{**listed, "name": name}]})
        else:
            deployed = {"id": "56", "displayName": "clicks"}
            kinds = {
                "supportedDeploymentResourcesTypes": ["DEDICATED_RESOURCES"]
            }
            things = {"deployedModels": [deployed], **kinds}
            self.answer({"name": path[4:], **things})

    def do_DELETE(self):
        self.server.requests.append((self.path.partition("?")[0], {}))
        self.answer(self.operation(self.path))

    def operation(self, path):
        last = path.rpartition("/")[2]
        return {
            "name": "projects/1/locations/us-central1/operations/7",
            "done": True,
            "response": RESULTS.get(last, {}),
        }

    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@needs_gcloud
@pytest.mark.slow
def test_gcloud_takes_the_commands(tmp_path):
    """From the upload to the end, as a user pastes them."""
    parts = [block("sh elsewhere", "PROJECT=my-project")]
    for containing in ("SERVING=", "$IMAGE-serving serving", "MODEL=$("):
        parts.append(block("sh elsewhere", containing))
    undeploy = block("sh elsewhere", "undeploy-model").partition(
        "gcloud storage"
    )
    script = "\n".join([*parts, undeploy[0]])
    script = script.replace("gcloud builds", "true gcloud builds")
    with serving(Finished) as server:
        run_gcloud(tmp_path, f"set -euo pipefail\n{script}", server)
    requests = {}
    for path, body in server.requests:
        requests.setdefault(path.rpartition("/")[2], []).append(body)
    prebuilt, own = requests["models:upload"]
    for upload in (prebuilt, own):
        as_proto(UploadModelRequest, upload)
    bucket = "gs://my-project-clicks/clicks"
    assert prebuilt["model"]["artifactUri"] == f"{bucket}/model"
    assert own["model"]["artifactUri"] == f"{bucket}/checkpoints/export/serving"
    container = own["model"]["containerSpec"]
    assert container["args"][-1] == "--model_base_path=$(AIP_STORAGE_URI)"
    assert container["ports"] == [{"containerPort": 8501}]
    (endpoint,) = requests["endpoints"]
    as_proto(Endpoint, endpoint)
    (deployed,) = requests["34:deployModel"]
    as_proto(DeployModelRequest, deployed)
    assert deployed["trafficSplit"] == {"0": 100}
    assert deployed["deployedModel"]["model"].endswith("/models/12")
    assert requests["34:undeployModel"][0]["deployedModelId"] == "56"
    assert "34" in requests  # Deleted.
