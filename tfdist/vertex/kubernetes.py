r"""A job on Kubernetes: `python -m tfdist.kubernetes > job.yaml`.

    python -m tfdist.kubernetes --workers=4 --ps=2 --evaluator \
        --image=my-registry/trainer:1 -- --model_dir=gs://my-bucket/clicks
    kubectl apply -f job.yaml

The same shapes as `tfdist.vertex`, in one of two kinds:

* `--kind=plain` (default): one indexed Job per role and a headless Service, in
  which every pod keeps its name, and `TF_CONFIG` is written out. Nothing but
  Kubernetes 1.31 or later is needed. (Not a StatefulSet: it would start again
  the servers that end when the chief is done.)
* `--kind=tfjob`: a TFJob for the training operator v1, which sets `TF_CONFIG`.
  Its successor, Kubeflow Trainer v2, has no TensorFlow runtime.

TensorFlow's servers authenticate nobody and execute any graph they are sent. A
NetworkPolicy lets only the pods of the job reach each other, if the cluster's
network enforces such policies; the comment in the file says so too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tfdist.cluster.spec import Cluster
from tfdist.launch.processes import PS_ENV, PS_JOB_ENV
from tfdist.vertex.command import add_flags
from tfdist.vertex.jobs import Tasks, as_list, flag, given

_PORT = 2222
_LABEL = "tfdist-job"
_CONTAINER = "tensorflow"  # The training operator looks for this name.
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# Exit codes of a mistake, after which another try is no use.
_PERMANENT = [1, 2]
_NAME = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
_TFJOB_ROLES = {
    "chief": ("Chief", "ExitCode"),
    "worker": ("Worker", "ExitCode"),
    "ps": ("PS", "Always"),
    "evaluator": ("Evaluator", "OnFailure"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Tasks):
    """A job on Kubernetes; its fields are flags of the command.

    Its `args`, flags of the trainer, must name a `model_dir` that all pods
    share.
    """

    name: str = flag("tfdist", "of the job and its pods")
    namespace: str = flag("default", "where it runs")
    gpus: int = flag(0, "GPUs of each task that computes gradients")
    cpu: str | None = flag(None, "what each task asks for, such as 4 or 500m")
    memory: str | None = flag(None, "what each task asks for, such as 16Gi")
    max_restarts: int = flag(6, "how often the pods of a role may fail")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.image:
            raise ValueError(
                "Argument `image` must name the container image of the tasks. "
                f"Received: image={self.image!r}."
            )
        if not re.fullmatch(_NAME, self.name):  # It begins each host name.
            raise ValueError(
                "Argument `name` must be at most 40 small letters, digits and "
                f"dashes. Received: name={self.name!r}."
            )

    @property
    def replicas(self) -> dict[str, int]:
        """Role -> number of its tasks, without roles that have none."""
        counts = {
            "chief": 1,
            "worker": self.workers,
            "ps": self.ps,
            "evaluator": int(self.evaluator),
        }
        return {role: count for role, count in counts.items() if count}

    @property
    def cluster(self) -> Cluster:
        """The tasks by their names in the headless Service, as the chief."""
        domain = f"{self.name}.{self.namespace}.svc:{_PORT}"
        addresses = {
            role: [f"{self.name}-{role}-{i}.{domain}" for i in range(count)]
            for role, count in self.replicas.items()
        }
        return Cluster.from_jobs(addresses, "chief", 0)

    def plain(self) -> list[dict[str, Any]]:
        """Objects for Kubernetes itself.

        >>> job = Job(name="a", image="i", workers=2, ps=1)
        >>> [object["metadata"]["name"] for object in job.plain()]
        ['a', 'a', 'a-chief', 'a-worker', 'a-ps']
        """
        service = {
            "clusterIP": "None",  # A name for each pod.
            "publishNotReadyAddresses": True,
            "selector": self._labels,
            "ports": [{"name": "grpc", "port": _PORT}],
        }
        return [
            self._network_policy(),
            self._object("v1", "Service", service),
            *(self._indexed_job(role, n) for role, n in self.replicas.items()),
        ]

    def tfjob(self) -> list[dict[str, Any]]:
        """Objects for the training operator v1."""
        specs = {}
        for role, count in self.replicas.items():
            name, restart = _TFJOB_ROLES[role]
            specs[name] = {
                "replicas": count,
                "restartPolicy": restart,
                "template": self._template(role),
            }
        policy = {
            "cleanPodPolicy": "Running",
            "backoffLimit": self.max_restarts,
        }
        spec = {"runPolicy": policy, "tfReplicaSpecs": specs}
        job = self._object("kubeflow.org/v1", "TFJob", spec)
        return [self._network_policy(), job]

    def _object(
        self, api: str, kind: str, spec: dict[str, Any], suffix: str = ""
    ) -> dict[str, Any]:
        metadata = {
            "name": f"{self.name}{suffix}",
            "namespace": self.namespace,
            "labels": self._labels,
        }
        return {
            "apiVersion": api,
            "kind": kind,
            "metadata": metadata,
            "spec": spec,
        }

    @property
    def _labels(self) -> dict[str, str]:
        return {_LABEL: self.name}

    def _network_policy(self) -> dict[str, Any]:
        """Only pods of this job may connect to pods of this job."""
        pods = {"podSelector": {"matchLabels": self._labels}}
        spec = {
            **pods,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [pods]}],
        }
        return self._object("networking.k8s.io/v1", "NetworkPolicy", spec)

    def _indexed_job(self, role: str, count: int) -> dict[str, Any]:
        """The pods of a role; number i is called `<name>-<role>-<i>`.

        A failed pod starts again under its name. That of a chief who made a
        mistake does not, and a pod whose machine was taken away costs no try.
        """
        taken = {"type": "DisruptionTarget", "status": "True"}
        rules: list[Any] = [{"action": "Ignore", "onPodConditions": [taken]}]
        if role == "chief":
            codes = {
                "containerName": _CONTAINER,
                "operator": "In",
                "values": _PERMANENT,
            }
            rules.append({"action": "FailJob", "onExitCodes": codes})
        template = self._template(role)
        template["spec"] |= {"subdomain": self.name, "restartPolicy": "Never"}
        tf_config = self.cluster.tf_config(role, 0).replace(
            '"index": 0', '"index": $(TASK_INDEX)'
        )
        template["spec"]["containers"][0]["env"] += [
            {
                "name": "TASK_INDEX",
                "valueFrom": {"fieldRef": {"fieldPath": _INDEX}},
            },
            {"name": "TF_CONFIG", "value": tf_config},
        ]
        spec = {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": self.max_restarts,
            "podFailurePolicy": {"rules": rules},
            "template": template,
        }
        return self._object("batch/v1", "Job", spec, suffix=f"-{role}")

    def _template(self, role: str) -> dict[str, Any]:
        """The pods of a role, without what tells them their place."""
        asked = given({"cpu": self.cpu, "memory": self.memory})
        resources: dict[str, Any] = {"requests": asked} if asked else {}
        computes = role == "worker" or (role == "chief" and not self.ps)
        if self.gpus and computes:
            resources["limits"] = {"nvidia.com/gpu": str(self.gpus)}
        container = {
            "name": _CONTAINER,
            "image": self.image,
            "command": ["python", "-m", self.module],
            # Kubernetes would replace $(NAME).
            "args": [arg.replace("$(", "$$(") for arg in self.args],
            "env": as_list(PS_JOB_ENV | (PS_ENV if role == "ps" else {})),
            "ports": [{"name": "tfjob-port", "containerPort": _PORT}],
            "resources": resources,
        }
        spec = {
            # Whoever gets into a task should not get into the cluster.
            "automountServiceAccountToken": False,
            "containers": [container],
            "serviceAccountName": self.service_account,
        }
        metadata = {
            "labels": self._labels,
            # A proxy of Istio would break TensorFlow's own protocol.
            "annotations": {"sidecar.istio.io/inject": "false"},
        }
        return {"metadata": metadata, "spec": given(spec)}


def _to_yaml(objects: Sequence[Mapping[str, Any]], shape: str) -> str:
    head = f"""\
# {shape}. Start it with:
#   kubectl apply -f job.yaml
# and remove it, also after a failure, with:
#   kubectl delete -f job.yaml
# TensorFlow's servers authenticate nobody and execute any graph that
# they are sent. The NetworkPolicy keeps others away only if the
# cluster's network enforces such policies (on GKE: Dataplane V2).
"""
    # Copies, or YAML would refer to what occurs twice by an alias.
    copies = json.loads(json.dumps(objects))
    body = yaml.safe_dump_all(copies, sort_keys=False, width=10_000)
    return head + body


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; see `python -m tfdist.kubernetes --help`.

    Returns 0; a job that is wrong exits with 2 and a message.
    """
    parser = argparse.ArgumentParser(
        prog="tfdist kubernetes",
        usage="%(prog)s [flags] -- [flags of the trainer] > job.yaml",
        description="Prints the YAML of a job on Kubernetes.",
        allow_abbrev=False,
    )
    add_flags(parser, Job)
    text = "plain: for Kubernetes itself; tfjob: for the training operator v1"
    parser.add_argument(
        "--kind", choices=("plain", "tfjob"), default="plain", help=text
    )
    parser.add_argument("args", nargs="*", help=argparse.SUPPRESS)
    options = vars(parser.parse_args(argv))
    kind = options.pop("kind")
    try:
        job = Job(**options)
    except ValueError as error:
        parser.error(str(error))
    objects = job.plain() if kind == "plain" else job.tfjob()
    print(_to_yaml(objects, job.cluster.shape), end="")
    return 0
