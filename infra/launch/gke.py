"""TPU slices on GKE: renders a JobSet and submits it through our XManager executor.

    spec = render(job)                                  # a plain dict, exactly what is sent
    handle = launch_gke(job, namespace="default")       # through XManager's experiment and database

Why our own: XManager 0.8.5's `xm_local.Kubernetes` emits no `google.com/tpu` limit and no node selector for
TPU VMs, and its wait never returns for a failed job. The surprising thing: a pod that ends with 75 (saved), or whose
node is taken away, *fails its Job on purpose* with the reason PodFailurePolicy, for which the JobSet restarts all
hosts without counting; any other failure counts towards `maxRestarts`.

Sources: JobSet API v1alpha2 (kubernetes-sigs/jobset @ f22237a, failure policy); GKE documentation, "Plan TPUs in
GKE" (node selectors), "Cloud Storage FUSE CSI driver" (volumes), "Spot VMs", "flex-start".
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.errors import LaunchError
from infra.launch.executor import submit
from infra.launch.job import PREEMPTED_CODE, Job, Spec, Status, command, environment, require, status_of
from infra.launch.patience import CALL_SECONDS, judge_kubernetes, patiently

GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
REPLICATED = "slice"
COORDINATOR_PORT = 8476
GRACE_SECONDS = 120
UID = 10001
POLL_SECONDS = 10.0


def run_bucket(job: Job) -> tuple[str, str]:
    """(bucket, path) of the job's run directory."""
    bucket, _, path = job.run.removeprefix("gs://").partition("/")
    return bucket, path.strip("/")


def render(job: Job) -> Spec:
    """The whole JobSet of a job, as the API server gets it."""
    from kubernetes import client as k8s

    slice_ = require(job, "gke")
    selector = {
        "cloud.google.com/gke-tpu-accelerator": slice_.type.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": slice_.topology,
    }
    tolerations = [k8s.V1Toleration(key="google.com/tpu", operator="Exists", effect="NoSchedule")]
    extra = {"spot": "cloud.google.com/gke-spot", "flex_start": "cloud.google.com/gke-flex-start"}.get(
        job.capacity
    )
    if extra:
        selector[extra] = "true"
        tolerations.append(k8s.V1Toleration(key=extra, operator="Equal", value="true", effect="NoSchedule"))
    env = {
        **environment(job),
        "JAX_COORDINATOR_ADDRESS": f"{job.name}-{REPLICATED}-0-0.{job.name}:{COORDINATOR_PORT}",
    }
    bucket, _ = run_bucket(job)
    container = k8s.V1Container(
        name="job",
        image=job.image,
        command=command(job),
        env=[k8s.V1EnvVar(name=k, value=v) for k, v in env.items()],
        ports=[k8s.V1ContainerPort(container_port=p) for p in (8471, COORDINATOR_PORT)],
        resources=k8s.V1ResourceRequirements(
            limits={"google.com/tpu": str(slice_.chips_per_host)},
            requests={"google.com/tpu": str(slice_.chips_per_host)},
        ),
        volume_mounts=[
            k8s.V1VolumeMount(name="bucket", mount_path=f"/gcs/{bucket}"),
            k8s.V1VolumeMount(name="work", mount_path="/scratch"),
            k8s.V1VolumeMount(name="shm", mount_path="/dev/shm"),
        ],
        security_context=k8s.V1SecurityContext(
            allow_privilege_escalation=False, run_as_non_root=True, run_as_user=UID, run_as_group=UID
        ),
    )
    pod = k8s.V1PodSpec(
        restart_policy="Never",
        service_account_name=job.service_account or None,
        node_selector=selector,
        tolerations=tolerations,
        termination_grace_period_seconds=GRACE_SECONDS,
        security_context=k8s.V1PodSecurityContext(fs_group=UID),
        containers=[container],
        volumes=[
            k8s.V1Volume(
                name="bucket",
                csi=k8s.V1CSIVolumeSource(
                    driver="gcsfuse.csi.storage.gke.io",
                    volume_attributes={
                        "bucketName": bucket,
                        "mountOptions": f"implicit-dirs,uid={UID},gid={UID}",
                    },
                ),
            ),
            k8s.V1Volume(name="work", empty_dir=k8s.V1EmptyDirVolumeSource()),
            k8s.V1Volume(name="shm", empty_dir=k8s.V1EmptyDirVolumeSource(medium="Memory")),
        ],
    )
    policy = k8s.V1PodFailurePolicy(
        rules=[
            k8s.V1PodFailurePolicyRule(
                action="FailJob",
                on_exit_codes=k8s.V1PodFailurePolicyOnExitCodesRequirement(
                    container_name="job", operator="In", values=[PREEMPTED_CODE]
                ),
            ),
            k8s.V1PodFailurePolicyRule(
                action="FailJob",
                on_pod_conditions=[
                    k8s.V1PodFailurePolicyOnPodConditionsPattern(type="DisruptionTarget", status="True")
                ],
            ),
        ]
    )
    template = k8s.V1JobTemplateSpec(
        spec=k8s.V1JobSpec(
            parallelism=job.hosts,
            completions=job.hosts,
            completion_mode="Indexed",
            backoff_limit=0,
            pod_failure_policy=policy,
            template=k8s.V1PodTemplateSpec(
                metadata=k8s.V1ObjectMeta(
                    annotations={"gke-gcsfuse/volumes": "true"}, labels=dict(job.labels) or None
                ),
                spec=pod,
            ),
        )
    )
    labels = {"app.kubernetes.io/name": "olmo3-repro", **job.labels}
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name},
        "failurePolicy": {
            "maxRestarts": job.restarts,
            "rules": [
                {
                    "name": "preempted",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                    "targetReplicatedJobs": [REPLICATED],
                }
            ],
        },
        "replicatedJobs": [{"name": REPLICATED, "replicas": 1, "template": template}],
    }
    if job.queue:
        labels["kueue.x-k8s.io/queue-name"] = job.queue
        spec["suspend"] = True
    metadata: dict[str, Any] = {"name": job.name, "labels": labels}
    if job.hosts > 1:
        metadata["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    whole = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "JobSet", "metadata": metadata, "spec": spec}
    return k8s.ApiClient(k8s.Configuration()).sanitize_for_serialization(whole)


def explain(job: Job) -> list[str]:
    """What the spec asks for, one line per decision."""
    slice_ = require(job, "gke")
    wait = {
        "spot": "spot nodes: cheap, may be taken away at any time",
        "flex_start": "flex-start nodes: wait for capacity, then uninterrupted for at most 7 days",
    }.get(job.capacity, "on-demand or reserved nodes")
    return [
        f"JobSet {job.name}: {slice_.name}, {slice_.chips} chips on {job.hosts} hosts, {slice_.devices} JAX devices",
        f"each host asks for google.com/tpu = {slice_.chips_per_host} on {slice_.type.gke_accelerator} {slice_.topology}; {wait}",
        f"{job.hosts} pods, all needed (parallelism = completions = {job.hosts}), one node pool for them alone"
        if job.hosts > 1
        else "one pod",
        f"the JobSet makes a headless service {job.name}; jax.distributed finds host 0 at {job.name}-{REPLICATED}-0-0.{job.name}",
        f"run directory {job.run}, bucket mounted at /gcs/{run_bucket(job)[0]} (needs the GCS FUSE add-on)",
        f"as Kubernetes account {job.service_account or 'default'} with Workload Identity; user {UID}, not root",
        f"exit 75 or a lost node restarts all hosts without counting; other failures at most {job.restarts} times",
        f"waits in the Kueue queue {job.queue}" if job.queue else "starts as soon as nodes are there",
    ]


class JobSets:
    """The calls to the API server that we need. `context`: kubeconfig context; inside a cluster its own account.

    `patience`: how long to wait out passing trouble, as `patiently` takes it (`longest`, `sleep`, `say`).
    Every call raises LaunchError when the API refuses or stays away.
    """

    def __init__(
        self,
        namespace: str = "default",
        context: str = "",
        api_client: Any = None,
        patience: dict[str, Any] | None = None,
    ):
        from kubernetes import client as k8s
        from kubernetes import config

        if api_client is None:
            try:
                if context or not os.environ.get("KUBERNETES_SERVICE_HOST"):
                    config.load_kube_config(context=context or None)
                else:
                    config.load_incluster_config()
            except config.ConfigException as e:
                raise LaunchError(
                    f"no Kubernetes cluster is configured: {e}",
                    "run `gcloud container clusters get-credentials CLUSTER --region REGION`",
                ) from None
            api_client = k8s.ApiClient()
        self.namespace, self.patience = namespace, patience or {}
        self._where = (GROUP, VERSION, namespace, PLURAL)
        self.objects, self.core = k8s.CustomObjectsApi(api_client), k8s.CoreV1Api(api_client)

    def _ask(self, what: str, call: Callable[[], Any], **how: Any) -> Any:
        return patiently(call, judge=judge_kubernetes, what=what, **self.patience, **how)

    def create(self, spec: Spec) -> None:
        """Submit; an existing JobSet of the same name is an error, unless an unanswered try of ours has made it."""
        name = spec["metadata"]["name"]
        self._ask(
            f"JobSet {name} was refused",
            lambda: self.objects.create_namespaced_custom_object(
                *self._where, spec, _request_timeout=CALL_SECONDS
            ),
            accept=lambda judgement, tried_before: judgement.code == 409 and tried_before,
            remedies={
                404: "install JobSet in the cluster: https://jobset.sigs.k8s.io/docs/installation/",
                409: f"it runs already; `kubectl delete jobset {name}` removes it",
                403: "your account may not create JobSets in this namespace",
            },
        )

    def get(self, name: str) -> dict[str, Any] | None:
        """The JobSet with its status; None when it is gone."""
        found: dict[str, Any] | None = self._ask(
            f"JobSet {name} cannot be read",
            lambda: self.objects.get_namespaced_custom_object(
                *self._where, name, _request_timeout=CALL_SECONDS
            ),
            accept=lambda judgement, tried_before: judgement.code == 404,
        )
        return found

    def delete(self, name: str) -> None:
        """Delete; the pods get SIGTERM and the grace period, so the trainer saves. One that is gone is no error."""
        self._ask(
            f"JobSet {name} cannot be deleted",
            lambda: self.objects.delete_namespaced_custom_object(
                *self._where, name, propagation_policy="Foreground", _request_timeout=CALL_SECONDS
            ),
            accept=lambda judgement, tried_before: judgement.code == 404,
        )

    def pods(self, name: str) -> list[Any]:
        """Pods of the JobSet, by completion index, the newest of each last."""
        found = self._ask(
            f"the pods of JobSet {name} cannot be listed",
            lambda: self.core.list_namespaced_pod(
                self.namespace,
                label_selector=f"jobset.sigs.k8s.io/jobset-name={name}",
                _request_timeout=CALL_SECONDS,
            ),
        ).items
        index = "batch.kubernetes.io/job-completion-index"
        return sorted(
            found,
            key=lambda p: (
                int((p.metadata.annotations or {}).get(index, 0)),
                str(p.metadata.creation_timestamp),
            ),
        )

    def log(self, pod: str, lines: int) -> list[str]:
        """The last lines of a pod's output; none of a pod that has not started (400) or is gone (404)."""
        found = self._ask(
            f"the log of pod {pod} cannot be read",
            lambda: self.core.read_namespaced_pod_log(
                pod, self.namespace, container="job", tail_lines=lines, _request_timeout=CALL_SECONDS
            ),
            accept=lambda judgement, tried_before: judgement.code in (400, 404),
        )
        return (found or "").splitlines()


class GkeJob:
    """Our handle of a JobSet."""

    def __init__(self, api: JobSets, name: str, poll_seconds: float = POLL_SECONDS):
        self.api, self.name, self.poll_seconds = api, name, poll_seconds
        self._cancelled = False

    def status(self) -> Status:
        found = self.api.get(self.name)
        if found is None:
            return Status.CANCELLED
        conditions = {c["type"]: c["status"] == "True" for c in found.get("status", {}).get("conditions", [])}
        if conditions.get("Completed"):
            return Status.SUCCEEDED
        if conditions.get("Failed"):
            return Status.PREEMPTED if self.exit_code == PREEMPTED_CODE else Status.FAILED
        if conditions.get("Suspended") or not any(
            p.status.phase == "Running" for p in self.api.pods(self.name)
        ):
            return Status.QUEUED
        return Status.RUNNING

    @property
    def exit_code(self) -> int | None:
        """The worst exit code of the pods that have ended: a failure before 75, 75 before 0."""
        codes = [
            c.state.terminated.exit_code
            for p in self.api.pods(self.name)
            for c in (p.status.container_statuses or [])
            if c.name == "job" and c.state and c.state.terminated
        ]
        rank = {Status.FAILED: 2, Status.PREEMPTED: 1, Status.SUCCEEDED: 0}
        return max(codes, key=lambda c: rank[status_of(c)], default=None)

    def wait(self, timeout: float | None = None) -> Status:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (status := self.status()).ended:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"JobSet {self.name} is still {status} after {timeout:.0f} s")
            time.sleep(self.poll_seconds)
        return status

    def logs(self, lines: int = 100) -> list[str]:
        """Of the pod that ended worst, else of host 0."""
        pods = self.api.pods(self.name)
        if not pods:
            return []

        def failed(p: Any) -> bool:
            return any(c.state and c.state.terminated and status_of(c.state.terminated.exit_code) == Status.FAILED
                       for c in (p.status.container_statuses or []))  # fmt: skip

        chosen = next((p for p in pods if failed(p)), pods[0])
        return self.api.log(chosen.metadata.name, lines)

    def cancel(self) -> None:
        self.api.delete(self.name)


def standing(job: Job, api: JobSets, poll_seconds: float = POLL_SECONDS) -> GkeJob | None:
    """The job of this name if it is still at work; one that has ended is deleted to make room."""
    if api.get(job.name) is None:
        return None
    handle = GkeJob(api, job.name, poll_seconds)
    if not handle.status().ended:
        return handle
    api.delete(job.name)
    deadline = time.monotonic() + 2 * GRACE_SECONDS
    while api.get(job.name) is not None:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"the ended JobSet {job.name} does not go away", f"`kubectl delete jobset {job.name}`"
            )
        time.sleep(poll_seconds)
    return None


def launch_gke(job: Job, api: JobSets, state_dir: Path, poll_seconds: float = POLL_SECONDS) -> GkeJob:
    """Submit through an XManager experiment; returns at once. A JobSet of this name that still runs is taken over."""

    def start() -> GkeJob:
        api.create(render(job))
        return GkeJob(api, job.name, poll_seconds)

    def record(made: GkeJob, experiment_id: int, work_unit_id: int) -> None:
        from xmanager.xm_local.storage import database

        database.database().insert_kubernetes_job(experiment_id, work_unit_id, api.namespace, made.name)

    return standing(job, api, poll_seconds) or submit(job, start, record, state_dir)
