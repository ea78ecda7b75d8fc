r"""A job on Kubernetes: `python -m tfdist.kubernetes > job.yaml`.

    python -m tfdist.kubernetes --workers=4 --ps=2 --evaluator \
        --image=my-registry/trainer:1 -- --model_dir=gs://my-bucket/clicks
    kubectl apply -f job.yaml

The job has the same shapes as in `tfdist.vertex` and is of one of three kinds:

* `--kind=plain` (default): one indexed Job per role, with stable pod names and
  an explicit `TF_CONFIG`, and a headless Service. Requires only Kubernetes 1.31
  or later. (A StatefulSet would restart the servers, which exit when the chief
  is done.)
* `--kind=jobset`: the same Jobs as one JobSet, which Kueue can queue. Its
  controller creates the Service and ends all Jobs when the chief is done.
* `--kind=tfjob`: a TFJob for the training operator v1, which sets `TF_CONFIG`.
  Its successor, Kubeflow Trainer v2, has no TensorFlow runtime.

TensorFlow's servers do not authenticate clients and execute any graph they
receive. A NetworkPolicy lets only the pods of the job connect to them, provided
that the cluster's network enforces such policies. The pods can reach each
other, DNS and `--egress`; if a flag of the trainer contains `gs://`, also
Google's metadata server and, without `--egress`, port 443 of any address. They
run as user 1000 without privileges, and can write only to `/tmp`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tfdist.cluster.spec import Cluster
from tfdist.launch.processes import PS_ENV, PS_JOB_ENV
from tfdist.launch.supervisor import task_ids
from tfdist.vertex.command import add_flags
from tfdist.vertex.job_file import Dumper
from tfdist.vertex.jobs import Tasks, as_list, flag, given

_PORT = 2222
_LABEL = "tfdist-job"
_CONTAINER = "tensorflow"  # The training operator looks for this name.
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# Exit codes of permanent errors, after which a retry is useless.
_PERMANENT = [1, 2]
_USER = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 1000)
_HTTPS = "0.0.0.0/0:443"  # For gs://; its credentials on GKE come from:
_METADATA = ("169.254.169.254/32:80", "169.254.169.252/32:988")
_CIDR_PORT = r"[0-9a-f.:]+/\d+:\d+"
_NAMES = {  # The first begins each host name.
    "name": (40, r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"),
    "namespace": (63, r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"),
}
_TFJOB_ROLES = {
    "chief": ("Chief", "ExitCode"),
    "worker": ("Worker", "ExitCode"),
    "ps": ("PS", "Always"),
    "evaluator": ("Evaluator", "OnFailure"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Tasks):
    """A job on Kubernetes; its fields are flags of the command.

    `args`, flags of the trainer, must set a `model_dir` that all pods share.
    """

    name: str = flag("tfdist", "name of the job and its pods")
    namespace: str = flag("default", "namespace of the job")
    gpus: int = flag(0, "GPUs of each task that computes gradients")
    cpu: str | None = flag(None, "CPUs that each task requests: 4, 500m")
    memory: str | None = flag(None, "memory per task, for example 16Gi")
    max_restarts: int = flag(6, "maximum restarts of the pods of a role")
    egress: Sequence[str] = flag(
        (), "CIDR:PORT that the pods may connect to; can be repeated"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.image:
            raise ValueError(
                "Argument `image` must name the container image of the tasks. "
                f"Received: image={self.image!r}."
            )
        for field, (most, pattern) in _NAMES.items():
            if not re.fullmatch(pattern, name := getattr(self, field)):
                raise ValueError(
                    f"Argument `{field}` must be at most {most} lowercase "
                    f"letters, digits and dashes. Received: {field}={name!r}."
                )
        if self.ps and self.gpus > 1:
            raise ValueError(
                "Argument `gpus` must be at most 1 with `ps`, because a worker "
                f"then uses only one GPU. Received: gpus={self.gpus}."
            )
        if not all(re.fullmatch(_CIDR_PORT, text) for text in self.egress):
            raise ValueError(
                "Argument `egress` must have the form 10.0.0.0/8:443. "
                f"Received: egress={[*self.egress]}."
            )

    @property
    def replicas(self) -> dict[str, int]:
        """Maps each role to its number of tasks; omits roles without tasks."""
        tasks = task_ids(self.ps, self.workers, self.evaluator, data_workers=0)
        return Counter(role for role, _ in tasks)

    def cluster(self, job: str = "{}") -> Cluster:
        """Returns the chief's view of the cluster, with the pods' host names.

        The Job of a role is named `<name>-<job>`.
        """
        host = f"{self.name}-{job}-{{}}.{self.name}.{self.namespace}.svc"
        addresses = {
            role: [f"{host.format(role, i)}:{_PORT}" for i in range(count)]
            for role, count in self.replicas.items()
        }
        return Cluster.from_jobs(addresses, "chief", 0)

    def plain(self) -> list[dict[str, Any]]:
        """Returns the objects for plain Kubernetes.

        >>> job = Job(name="a", image="i", workers=2, ps=1)
        >>> [object["metadata"]["name"] for object in job.plain()]
        ['a', 'a', 'a-chief', 'a-worker', 'a-ps']
        """
        service = {
            "clusterIP": "None",  # Gives each pod a DNS name.
            "publishNotReadyAddresses": True,
            "selector": self._labels,
            "ports": [{"name": "grpc", "port": _PORT}],
        }
        return [
            self._network_policy(),
            self._object("v1", "Service", service),
            *(
                self._object("batch/v1", "Job", spec, suffix=f"-{role}")
                for role, spec in self._jobs(self.cluster()).items()
            ),
        ]

    def jobset(self) -> list[dict[str, Any]]:
        """Returns the objects for the controller of JobSets, v1alpha2."""
        done = {"operator": "All", "targetReplicatedJobs": ["chief"]}
        spec = {
            "network": {"enableDNSHostnames": True, "subdomain": self.name},
            "successPolicy": done,
            "failurePolicy": {"maxRestarts": 0},  # The Jobs restart pods.
            "replicatedJobs": [
                {"name": role, "replicas": 1, "template": {"spec": job}}
                for role, job in self._jobs(self.cluster("{}-0")).items()
            ],
        }
        jobset = self._object("jobset.x-k8s.io/v1alpha2", "JobSet", spec)
        return [self._network_policy(), jobset]

    def tfjob(self) -> list[dict[str, Any]]:
        """Returns the objects for the training operator v1."""
        specs = {}
        for role, count in self.replicas.items():
            name, restart = _TFJOB_ROLES[role]
            specs[name] = {
                "replicas": count,
                "restartPolicy": restart,
                "template": self._template(role),
            }
        tries = self.max_restarts
        policy = {"cleanPodPolicy": "Running", "backoffLimit": tries}
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
        head = {"apiVersion": api, "kind": kind, "metadata": metadata}
        return {**head, "spec": spec}

    @property
    def _labels(self) -> dict[str, str]:
        return {_LABEL: self.name}

    def _network_policy(self) -> dict[str, Any]:
        """Lets the pods of this job reach each other, DNS and `egress`."""
        pods = {"podSelector": {"matchLabels": self._labels}}
        dns = [{"protocol": p, "port": 53} for p in ("UDP", "TCP")]
        egress: list[Any] = [{"to": [pods]}, {"ports": dns}]
        ways = [*self.egress]
        if any("gs://" in arg for arg in self.args):
            ways = [*(ways or [_HTTPS]), *_METADATA]
        for text in ways:
            cidr, _, port = text.rpartition(":")
            ports = [{"protocol": "TCP", "port": int(port)}]
            egress.append({"to": [{"ipBlock": {"cidr": cidr}}], "ports": ports})
        spec = {
            **pods,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [pods]}],
            "egress": egress,
        }
        return self._object("networking.k8s.io/v1", "NetworkPolicy", spec)

    def _jobs(self, cluster: Cluster) -> dict[str, dict[str, Any]]:
        """Returns the Job of each role; its pods are `<name of the Job>-<i>`.

        A failed pod restarts under its name, unless it is a chief that failed
        permanently. The loss of a machine does not count as a restart.
        """
        roles = self.replicas.items()
        return {role: self._job(role, n, cluster) for role, n in roles}

    def _job(self, role: str, count: int, cluster: Cluster) -> dict[str, Any]:
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
        tf_config = cluster.tf_config(role, 0).replace(
            '"index": 0', '"index": $(TASK_INDEX)'
        )
        index = {"fieldRef": {"fieldPath": _INDEX}}
        template["spec"]["containers"][0]["env"] += [
            {"name": "TASK_INDEX", "valueFrom": index},
            {"name": "TF_CONFIG", "value": tf_config},
        ]
        return {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": self.max_restarts,
            "podFailurePolicy": {"rules": rules},
            "template": template,
        }

    def _template(self, role: str) -> dict[str, Any]:
        """Returns the pod template of a role, without `TF_CONFIG`."""
        asked = given({"cpu": self.cpu, "memory": self.memory})
        resources: dict[str, Any] = {"requests": asked} if asked else {}
        computes = role == "worker" or (role == "chief" and not self.ps)
        if self.gpus and computes:
            resources["limits"] = {"nvidia.com/gpu": str(self.gpus)}
        env = {"HOME": "/tmp", **PS_JOB_ENV, **(PS_ENV if role == "ps" else {})}
        container = {
            "name": _CONTAINER,
            "image": self.image,
            "command": ["python", "-m", self.module],
            # Kubernetes would expand $(NAME), and replaces $$ by $.
            "args": [arg.replace("$", "$$") for arg in self.args],
            "env": as_list(env),
            "ports": [{"name": "tfjob-port", "containerPort": _PORT}],
            "resources": resources,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        }
        spec = {
            # A compromised task must not get access to the cluster.
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                **_USER,  # As in vertex/Dockerfile; other images use it, too.
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
            "serviceAccountName": self.service_account,
        }
        metadata = {
            "labels": self._labels,
            # An Istio proxy would break TensorFlow's own protocol.
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
    # Without copies, YAML would write aliases for objects that occur twice.
    copies = json.loads(json.dumps(objects))
    options = {"sort_keys": False, "width": 10_000}
    return head + yaml.dump_all(copies, Dumper=Dumper, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; exits with 2 and a message if the job is invalid."""
    parser = argparse.ArgumentParser(
        prog="tfdist kubernetes",
        usage="%(prog)s [flags] -- [flags of the trainer] > job.yaml",
        description="Prints the YAML of a job on Kubernetes.",
        allow_abbrev=False,
    )
    add_flags(parser, Job)
    kinds = ("plain", "jobset", "tfjob")
    text = "plain Kubernetes, its JobSet controller, or training operator v1"
    parser.add_argument("--kind", choices=kinds, default=kinds[0], help=text)
    parser.add_argument("args", nargs="*", help=argparse.SUPPRESS)
    options = vars(parser.parse_args(argv))
    kind = options.pop("kind")
    try:
        job = Job(**options)
    except ValueError as error:
        parser.error(str(error))
    print(_to_yaml(getattr(job, kind)(), job.cluster().shape), end="")
    return 0
