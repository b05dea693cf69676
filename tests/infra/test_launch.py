"""Specs as they are sent, against the kubernetes client, XManager's own proto and Vertex' proto; handles against a
small API server over real HTTP; resume until done."""

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from kubernetes import client as k8s

from infra.config import LaunchConfig
from infra.errors import LaunchError, RecipeError
from infra.launch import gke, targets, vertex
from infra.launch.job import Job, Status
from infra.launch.local import LocalJob
from infra.launch.until_done import RelaunchPolicy, run_until_done
from infra.topology import TYPES, parse

pytestmark = pytest.mark.usefixtures("xmanager_database")

IMAGE = "us-docker.pkg.dev/p/repro/train:1"


def job(slice_="v5p:4x4x4", **fields) -> Job:
    given = {"image": IMAGE, "run": "gs://bkt/runs/a", "args": ("--distributed",), **fields}
    return Job("repro-a", "model.train", slice=parse(slice_) if slice_ else None, **given)


# Field names of JobSet v1alpha2, from its API reference; everything below `template` is the client's own type.
JOBSET = {
    "spec": {"coordinator", "failurePolicy", "managedBy", "network", "replicatedJobs", "startupPolicy", "successPolicy",
             "suspend", "ttlSecondsAfterFinished"},
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "rule": {"action", "name", "onJobFailureReasons", "targetReplicatedJobs"},
    "network": {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"},
    "replicatedJob": {"dependsOn", "groupName", "name", "replicas", "template"},
}  # fmt: skip


@pytest.mark.parametrize(
    "slice_", ["v5p:4x4x4", "v6e:2x4", "v6e:1x1", "v5e:16x16", "tpu7x:4x4x4", "v4:2x2x1"]
)
def test_jobset_is_what_the_api_server_knows(slice_):
    spec = gke.render(job(slice_, queue="q"))
    assert (spec["apiVersion"], spec["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    body = spec["spec"]
    assert set(body) <= JOBSET["spec"] and set(body["network"]) <= JOBSET["network"]
    assert set(body["failurePolicy"]) <= JOBSET["failurePolicy"]
    assert all(set(r) <= JOBSET["rule"] for r in body["failurePolicy"]["rules"])
    [replicated] = body["replicatedJobs"]
    assert set(replicated) <= JOBSET["replicatedJob"]
    api = k8s.ApiClient(k8s.Configuration())
    # Deserialised by the real client and serialised again: nothing is lost, so every field has its right name and type.
    typed = api._ApiClient__deserialize(replicated["template"], "V1JobTemplateSpec")
    assert api.sanitize_for_serialization(typed) == replicated["template"]
    hosts = parse(slice_).hosts
    assert (typed.spec.parallelism, typed.spec.completions, typed.spec.completion_mode) == (
        hosts,
        hosts,
        "Indexed",
    )
    pod = typed.spec.template.spec
    [container] = pod.containers
    chips = str(min(4, parse(slice_).chips))
    assert container.resources.limits == container.resources.requests == {"google.com/tpu": chips}
    assert pod.node_selector["cloud.google.com/gke-tpu-topology"] == slice_.split(":")[1]
    assert pod.restart_policy == "Never" and typed.spec.backoff_limit == 0
    assert container.security_context.run_as_non_root


def test_accelerator_names_are_those_of_xmanager_on_cloud():
    """An independent table: xm_cloud's own conversion. It names the tpu7x machine where GKE labels nodes `tpu7x`."""
    from xmanager import xm, xm_cloud
    from xmanager.xm_local import executables

    theirs = {}
    for name, kind in {
        "v4": "tpu_v4",
        "v5e": "tpu_v5e",
        "v5p": "tpu_v5p",
        "v6e": "tpu_v6e",
        "tpu7x": "tpu_v7x",
    }.items():
        topology = "4x4" if TYPES[name].flat else "4x4x4"
        executable = executables.GoogleContainerRegistryImage(
            name="t", image_path=IMAGE, args=xm.SequentialArgs(), env_vars={}
        )
        wanted = xm.Job(
            executable, xm_cloud.KubernetesJobExecutor(xm.JobRequirements(**{kind: topology})), name="t"
        )
        proto = xm_cloud.experiment._convert_xm_job_to_ess_job(wanted, {"steps": "3"})
        selector = gke.render(job(f"{name}:{topology}"))["spec"]["replicatedJobs"][0]["template"]["spec"][
            "template"
        ]["spec"]["nodeSelector"]
        assert selector["cloud.google.com/gke-tpu-topology"] == proto.spec.resources.tpu_resources.topology
        theirs[name] = (
            selector["cloud.google.com/gke-tpu-accelerator"],
            proto.spec.resources.tpu_resources.type,
        )
        assert proto.spec.docker_image == IMAGE
    assert theirs.pop("tpu7x") == ("tpu7x", "tpu7x-standard-4t")
    assert all(ours == xm for ours, xm in theirs.values())


def test_preemption_restarts_without_counting_and_a_failure_counts():
    spec = gke.render(job(restarts=3))["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 3
    [rule] = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts" and rule["onJobFailureReasons"] == [
        "PodFailurePolicy"
    ]
    codes, disruption = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert codes == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "job", "operator": "In", "values": [75]},
    }
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_command_environment_account_and_capacity():
    spec = gke.render(job(service_account="trainer", capacity="spot", env={"XLA_FLAGS": "--a b"}))
    pod = spec["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["command"] == [
        "python",
        "-m",
        "infra.launch.worker",
        "--run",
        "gs://bkt/runs/a",
        "--module",
        "model.train",
        "--",
        "--distributed",
    ]
    env = {e["name"]: e["value"] for e in container["env"]}
    assert env["JAX_COORDINATOR_ADDRESS"] == "repro-a-slice-0-0.repro-a:8476"
    assert (env["REPRO_HOSTS"], env["REPRO_SLICE"], env["XLA_FLAGS"]) == ("16", "v5p:4x4x4", "--a b")
    assert spec["spec"]["network"] == {"enableDNSHostnames": True, "subdomain": "repro-a"}
    assert pod["serviceAccountName"] == "trainer"
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert {t["key"] for t in pod["tolerations"]} == {"google.com/tpu", "cloud.google.com/gke-spot"}
    assert pod["volumes"][0]["csi"]["volumeAttributes"]["bucketName"] == "bkt"
    queued = gke.render(job(queue="team", capacity="flex_start"))
    assert (
        queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
        and queued["spec"]["suspend"] is True
    )
    assert "suspend" not in spec["spec"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": ""}, "needs launch.image"),
        ({"run": ""}, "needs launch.bucket"),
        ({"slice_": None}, "needs launch.topology"),
        ({"image": "repo/train"}, "has no tag"),
        ({"env": {"HF_TOKEN": "hf_abcdefghijklmnopqrstuvwx"}}, "looks like a secret: HF_TOKEN"),
    ],
)
def test_an_incomplete_or_leaking_job_is_refused(fields, message):
    with pytest.raises(RecipeError, match=message):
        gke.render(job(**fields))


@pytest.mark.parametrize(
    ("slice_", "machine"),
    [("v6e:2x2", "ct6e-standard-4t"), ("v6e:1x1", "ct6e-standard-1t"), ("v5e:2x2", "ct5lp-hightpu-4t")],
)
def test_vertex_job(slice_, machine):
    from google.cloud import aiplatform_v1 as aip

    made = vertex.render(
        job(slice_, capacity="spot", service_account="a@p.iam.gserviceaccount.com", args=()), "p", "us-east5"
    )
    again = aip.CustomJob.deserialize(aip.CustomJob.serialize(made))
    [pool] = again.job_spec.worker_pool_specs
    assert (pool.machine_spec.machine_type, pool.machine_spec.tpu_topology, pool.replica_count) == (
        machine,
        slice_[4:],
        1,
    )
    assert [*pool.container_spec.command, *pool.container_spec.args][:3] == [
        "python",
        "-m",
        "infra.launch.worker",
    ]
    assert again.job_spec.scheduling.strategy.name == "SPOT" and again.job_spec.service_account.startswith(
        "a@p"
    )
    text = vertex.to_dict(made, "p", "us-east5")
    assert text["parent"] == "projects/p/locations/us-east5"
    assert text["customJob"]["jobSpec"]["workerPoolSpecs"][0]["machineSpec"]["tpuTopology"] == slice_[4:]


def test_vertex_refuses_what_it_cannot_train():
    with pytest.raises(RecipeError, match=r"trains on TPU v5e and v6e, not on v5p(.|\n)*gke"):
        vertex.render(job("v5p:2x2x1"), "p", "r")
    with pytest.raises(RecipeError, match="4 hosts"):
        vertex.render(job("v6e:4x4"), "p", "r")


class VertexService:
    """Answers like the service: states in order, and the error text that carries the exit status."""

    def __init__(self, states, message=""):
        self.states, self.message, self.cancelled, self.made, self.running = (
            list(states),
            message,
            [],
            None,
            False,
        )

    def create_custom_job(self, parent, custom_job, timeout):
        self.made = (parent, custom_job)
        return type(custom_job)(name=f"{parent}/customJobs/1")

    def get_custom_job(self, name, timeout=0):
        from google.cloud import aiplatform_v1 as aip
        from google.rpc import status_pb2

        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return aip.CustomJob(
            name=name,
            display_name="repro-a",
            state=aip.JobState[f"JOB_STATE_{state}"],
            error=status_pb2.Status(message=self.message),
        )

    def list_custom_jobs(self, request, timeout):
        return [self.get_custom_job("projects/p/locations/r/customJobs/1")] if self.running else []

    def cancel_custom_job(self, name, timeout):
        self.cancelled.append(name)


def test_vertex_exit_75_is_preempted(tmp_path):
    text = "The replica workerpool0-0 exited with a non-zero status of {}. To find out more …"
    for code, status in ((75, Status.PREEMPTED), (1, Status.FAILED)):
        service = VertexService(["PENDING", "RUNNING", "FAILED"], text.format(code))
        handle = vertex.launch_vertex(
            job("v6e:2x2"), vertex.VertexApi("p", "r", service), tmp_path, poll_seconds=0.01
        )
        assert handle.wait(10) == status and handle.exit_code == code
    busy = VertexService(["RUNNING"])
    busy.running = True
    assert (
        vertex.launch_vertex(job("v6e:2x2"), vertex.VertexApi("p", "r", busy), tmp_path).status()
        == Status.RUNNING
    )
    assert busy.made is None, "one that runs is taken over"
    handle.cancel()
    assert service.cancelled == ["projects/p/locations/r/customJobs/1"]


class Cluster:
    """The few paths of an API server that a JobSet needs, over HTTP; pods end as the test says."""

    def __init__(self):
        self.jobsets, self.pods, self.log, self.seen, self.made = {}, [], "", [], 0
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def say(self, status, value):
                body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header(
                    "Content-Type", "text/plain" if isinstance(value, str) else "application/json"
                )
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self):
                made = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name = made["metadata"]["name"]
                if name in cluster.jobsets:
                    return self.say(409, {"message": "already exists"})
                cluster.made += 1
                cluster.jobsets[name] = {**made, "status": {}}
                return self.say(201, made)

            def do_GET(self):
                url = urlsplit(self.path)
                cluster.seen.append(self.path)
                if "/jobsets/" in url.path:
                    found = cluster.jobsets.get(url.path.rsplit("/", 1)[1])
                    return self.say(200, found) if found else self.say(404, {"message": "not found"})
                if url.path.endswith("/log"):
                    lines = cluster.log.splitlines()[-int(parse_qs(url.query)["tailLines"][0]) :]
                    return self.say(200, "\n".join(lines))
                return self.say(200, {"items": cluster.pods})

            def do_DELETE(self):
                cluster.jobsets.pop(urlsplit(self.path).path.rsplit("/", 1)[1], None)
                self.say(200, {})

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        api = k8s.ApiClient(k8s.Configuration(host=f"http://127.0.0.1:{self.server.server_port}"))
        self.api = gke.JobSets("ns", api_client=api)

    def pod(self, index, phase, code=None):
        state = {"terminated": {"exitCode": code, "reason": "x"}} if code is not None else {"running": {}}
        return {
            "metadata": {"name": f"pod-{index}", "annotations": {"batch.kubernetes.io/job-completion-index": str(index)}},
            "spec": {"containers": [{"name": "job"}]},
            "status": {"phase": phase, "containerStatuses": [{"name": "job", "state": state, "image": "i", "imageID": "i", "ready": True, "restartCount": 0}]},
        }  # fmt: skip

    def finish(self, name, condition):
        self.jobsets[name]["status"] = {"conditions": [{"type": condition, "status": "True"}]}


@pytest.fixture
def cluster():
    made = Cluster()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_gke_job_from_launch_to_its_last_lines(cluster, tmp_path):
    handle = gke.launch_gke(job("v6e:2x4"), cluster.api, tmp_path, poll_seconds=0.05)
    assert cluster.jobsets["repro-a"]["kind"] == "JobSet"
    assert handle.status() == Status.QUEUED
    cluster.pods = [cluster.pod(0, "Running"), cluster.pod(1, "Running")]
    assert handle.status() == Status.RUNNING and handle.exit_code is None
    with pytest.raises(TimeoutError, match="still running"):
        handle.wait(0.1)
    cluster.pods = [cluster.pod(0, "Succeeded", 0), cluster.pod(1, "Failed", 3)]
    cluster.log = "one\ntwo\nboom"
    cluster.finish("repro-a", "Failed")
    assert handle.wait(5) == Status.FAILED and handle.exit_code == 3
    assert handle.logs(2) == ["two", "boom"] and "pod-1/log" in cluster.seen[-1]
    again = gke.launch_gke(job("v6e:2x4"), cluster.api, tmp_path, poll_seconds=0.05)
    assert cluster.jobsets["repro-a"]["status"] == {}, "the ended one has made room"
    cluster.pods = [cluster.pod(0, "Running")]
    adopted = gke.launch_gke(job("v6e:2x4"), cluster.api, tmp_path, poll_seconds=0.05)
    assert again.status() == adopted.status() == Status.RUNNING and cluster.made == 2, (
        "one that runs is taken over"
    )
    with pytest.raises(LaunchError, match=r"repro-a was refused: 409(.|\n)*kubectl delete jobset"):
        cluster.api.create(gke.render(job("v6e:2x4")))
    handle.cancel()
    assert handle.status() == Status.CANCELLED


def test_gke_experiment_is_in_xmanagers_database(cluster, tmp_path):
    import sqlite3

    from absl import flags

    gke.launch_gke(job("v6e:2x4"), cluster.api, tmp_path)
    config = Path(flags.FLAGS.xm_db_yaml_config_path).read_text().splitlines()
    database = next(line.split(": ", 1)[1] for line in config if "db_name" in line)
    with sqlite3.connect(database) as db:
        assert db.execute("select count(*) from job where job_data like '%repro-a%'").fetchone()[0] >= 1


@pytest.mark.parametrize("before", ["", "flags.FLAGS.mark_as_parsed()"])
def test_database_is_named_also_where_flags_count_as_parsed(tmp_path, before):
    code = (
        f"import pathlib\nfrom absl import flags\n{before}\nfrom infra.launch.local import parse_flags\n"
        f"parse_flags(pathlib.Path({str(tmp_path)!r}))\n"
        "from xmanager.xm_local.storage import database\nprint(database.db_settings().db_name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "xm.sqlite3")


def test_local_job_cancel_stops_the_whole_group(tmp_path):
    """XManager runs it under a shell; both the shell and what it started must be gone, after the job has saved."""
    (tmp_path / "sleeper.py").write_text(
        "import signal, subprocess, sys, time\nfrom pathlib import Path\nhere = Path(__file__).parent\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "def end(*a):\n time.sleep(0.5); (here / 'saved').write_text('x'); child.wait(); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, end)\nprint(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    made = LocalJob(
        "sleeper",
        [],
        name="s",
        log_dir=tmp_path / "logs",
        state_dir=tmp_path / "xm",
        env={"PYTHONPATH": str(tmp_path)},
    )
    deadline = time.monotonic() + 20
    while not made.logs() and time.monotonic() < deadline:
        time.sleep(0.05)
    grandchild = int(made.logs()[0])
    assert made.status() == Status.RUNNING and made.exit_code is None
    start = time.monotonic()
    made.cancel()
    assert time.monotonic() - start < 10
    assert (tmp_path / "saved").exists()
    assert made.wait(5) == Status.CANCELLED and made.exit_code == 75
    from infra.owner import start_time

    assert start_time(grandchild) == "" and start_time(made.pid) == ""


def test_one_door(tmp_path):
    (tmp_path / "ok.py").write_text("print('fine')")
    cfg = LaunchConfig(target="local")
    made = Job("repro-ok", "ok", env={"PYTHONPATH": str(tmp_path)})
    handle = targets.launch(made, cfg, state_dir=tmp_path / "xm", log_dir=tmp_path / "logs")
    assert handle.wait(30) == Status.SUCCEEDED and handle.logs() == ["fine"] and handle.exit_code == 0
    assert targets.spec(job(), LaunchConfig(target="gke"))["kind"] == "JobSet"
    lines = targets.by_hand(job(), LaunchConfig(target="gke"), tmp_path / "spec.json")
    assert f"docker push {IMAGE}" in lines and any("kubectl" in x and "apply -f" in x for x in lines)


class Scripted:
    """A handle that has ended, and moves the committed step as it is told."""

    name = "job"

    def __init__(self, status, code, log=("last line",)):
        self._status, self.exit_code, self._log = status, code, list(log)

    def wait(self, timeout=None):
        return self._status

    status = wait

    def logs(self, lines=100):
        return self._log[-lines:]


def until_done(script, goal=10, max_idle=2):
    """Run a script of (status, exit code, committed step afterwards); returns (outcome, waits, said)."""
    step, waits, said, script = [0], [], [], list(script)

    def start(attempt):
        status, code, after = script.pop(0)
        step[0] = after
        return Scripted(status, code)

    policy = RelaunchPolicy(max_idle=max_idle, backoff=30)
    outcome = run_until_done(start, lambda: step[0], goal, policy, say=said.append, sleep=waits.append)
    return outcome, waits, said


def test_preemption_is_not_an_error_and_progress_resets_the_count():
    P, F, S = Status.PREEMPTED, Status.FAILED, Status.SUCCEEDED
    outcome, waits, _ = until_done(
        [(P, 75, 2), (P, 75, 3), (F, 1, 3), (F, 1, 5), (F, 1, 5), (P, 75, 6), (S, 0, 10)]
    )
    assert (outcome.status, outcome.launches, outcome.step) == (S, 7, 10)
    assert waits == [0.0, 0.0, 30, 30, 30, 0.0]


def test_without_progress_it_stops_with_the_last_lines_and_the_waits_double():
    with pytest.raises(
        LaunchError,
        match=r"3 launches in a row gained no step \(still at 4 of 10\)(.|\n)*exit code 1(.|\n)*last line",
    ):
        until_done([(Status.FAILED, 1, 4)] * 4)
    _, waits, _ = until_done([(Status.FAILED, 1, 0)] * 3 + [(Status.SUCCEEDED, 0, 10)], max_idle=5)
    assert waits == [30, 60, 120]


def test_a_cancelled_job_is_not_launched_again_and_a_done_one_not_at_all():
    outcome, _, _ = until_done([(Status.CANCELLED, 75, 4)])
    assert (outcome.status, outcome.step) == (Status.CANCELLED, 4)
    outcome, _, _ = until_done([], goal=0)
    assert outcome.launches == 0
