"""Trouble of a cloud's API: what passes is waited out, what does not is one error that says what to do. Against a small API
server over real HTTP for Kubernetes, and google-api-core's own exceptions for Vertex AI."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from google.api_core import exceptions as google
from google.auth.exceptions import RefreshError, TransportError
from kubernetes import client as k8s

from infra.errors import LaunchError
from infra.launch import gke, vertex
from infra.launch.job import Job
from infra.launch.patience import judge_google, patiently
from infra.topology import parse

JOB = Job(
    "repro-a",
    "model.train",
    slice=parse("v6e:2x2"),
    image="us-docker.pkg.dev/p/repro/train:1",
    run="gs://b/run",
)


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self):
        self.time, self.pauses, self.said = 0.0, [], []

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.time += seconds

    def patience(self, longest=600.0):
        return {"longest": longest, "sleep": self.sleep, "now": lambda: self.time, "say": self.said.append}


@pytest.fixture
def server():
    """An API server that answers from a list of statuses; `made` are the bodies of the POSTs that it carried out."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def answer(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            status = made.answers.pop(0) if made.answers else 200
            if self.command == "POST" and status in (201, "lost"):
                made.posts.append(body)
            if status in ("reset", "lost"):
                self.connection.close()
                return
            text = json.dumps({"message": f"because of {status}", "items": []}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_DELETE = answer

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.answers, made.posts = [], []
    threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def api(server, clock, **how):
    configuration = k8s.Configuration(host=f"http://127.0.0.1:{server.server_port}")
    configuration.retries = False  # urllib3's own quick retries would hide what is counted here
    return gke.JobSets("ns", api_client=k8s.ApiClient(configuration), patience=clock.patience(**how))


def test_passing_trouble_is_waited_out_with_growing_pauses(server):
    clock = Clock()
    server.answers = [503, 429, "reset", 500, 504, 200]
    assert api(server, clock).get("a") == {"message": "because of 200", "items": []}
    assert clock.pauses == [1, 2, 4, 8, 16] and len(clock.said) == 3
    assert "JobSet a cannot be read" in clock.said[0]


def test_an_outage_that_does_not_end_is_one_error_and_says_that_the_job_goes_on(server):
    clock = Clock()
    server.answers = [503] * 100
    with pytest.raises(LaunchError, match=r"no useful answer for 10m00s; last: 503(.|\n)*is taken over"):
        api(server, clock).pods("a")
    assert sum(clock.pauses) <= 600 and max(clock.pauses) == 60


@pytest.mark.parametrize(
    "status, call, message",
    [
        (401, lambda a: a.get("a"), "401(.|\n)*get-credentials"),
        (403, lambda a: a.pods("a"), "403(.|\n)*your account lacks the right"),
        (403, lambda a: a.create(gke.render(JOB)), "403(.|\n)*may not create JobSets"),
        (404, lambda a: a.create(gke.render(JOB)), "404(.|\n)*install JobSet"),
        (422, lambda a: a.create(gke.render(JOB)), "refused: 422(.|\n)*because of 422"),
        (403, lambda a: a.delete("a"), "JobSet a cannot be deleted: 403"),
    ],
)
def test_a_refusal_is_not_waited_for(server, status, call, message):
    clock = Clock()
    server.answers = [status]
    with pytest.raises(LaunchError, match=message):
        call(api(server, clock))
    assert clock.pauses == []


def test_what_is_gone_is_an_answer(server):
    for call, found in (
        (lambda a: a.get("a"), None),
        (lambda a: a.delete("a"), None),
        (lambda a: a.log("p", 5), []),
    ):
        server.answers = [404]
        assert call(api(server, Clock())) == found


def test_a_job_that_an_unanswered_try_has_made_is_ours(server):
    server.answers = ["lost", 409]
    api(server, Clock()).create(gke.render(JOB))
    assert [p["metadata"]["name"] for p in server.posts] == ["repro-a"]
    server.answers = [409]
    with pytest.raises(LaunchError, match="it runs already"):
        api(server, Clock()).create(gke.render(JOB))


class Vertex:
    """A client whose calls raise what the test says, in order, and which carries out the rest."""

    def __init__(self, *errors):
        self.errors, self.made = list(errors), []

    def _maybe(self):
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error

    def create_custom_job(self, parent, custom_job, timeout):
        made = type(custom_job)(
            name=f"{parent}/customJobs/{len(self.made) + 1}", display_name=custom_job.display_name
        )
        if self.errors[:1] == ["lost"]:
            self.errors[0] = google.DeadlineExceeded("no answer in time")
            self.made.append(made)
        self._maybe()
        self.made.append(made)
        return made

    def list_custom_jobs(self, request, timeout):
        from google.cloud import aiplatform_v1 as aip

        for made in self.made:
            made.state = aip.JobState.JOB_STATE_PENDING
        return self.made

    def get_custom_job(self, name, timeout):
        self._maybe()
        return name

    def cancel_custom_job(self, name, timeout):
        self._maybe()


def vertex_api(client, clock):
    return vertex.VertexApi("p", "us-east5", client, clock.patience())


def test_vertex_waits_out_passing_trouble():
    clock = Clock()
    client = Vertex(
        google.ServiceUnavailable("busy"), google.TooManyRequests("slowly"), TransportError("reset")
    )
    assert vertex_api(client, clock).get("a") == "a" and clock.pauses == [1, 2, 4]


def test_vertex_never_makes_a_job_twice():
    client = Vertex("lost")
    assert vertex_api(client, Clock()).create(JOB) == "projects/p/locations/us-east5/customJobs/1"
    assert len(client.made) == 1


@pytest.mark.parametrize(
    "error, message",
    [
        (google.PermissionDenied("no"), r"403 no(.|\n)*roles/aiplatform.user"),
        (google.InvalidArgument("bad machine"), r"400 bad machine(.|\n)*--dry-run"),
        (google.Unauthenticated("who"), r"401 who(.|\n)*application-default login"),
        (RefreshError("expired"), r"credentials were not accepted(.|\n)*application-default login"),
    ],
)
def test_vertex_refusals_are_one_error(error, message):
    clock = Clock()
    with pytest.raises(LaunchError, match=message):
        vertex_api(Vertex(error), clock).create(JOB)
    assert clock.pauses == []


def test_cancelling_what_is_gone_is_no_error():
    vertex_api(Vertex(google.NotFound("gone")), Clock()).cancel("a")


def test_a_mistake_of_ours_is_not_taken_for_trouble_of_the_api():
    def wrong():
        raise KeyError("x")

    with pytest.raises(KeyError):
        patiently(wrong, judge=judge_google, what="a call")


def test_no_secret_in_what_is_said(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "hush-hush-hush")
    with pytest.raises(LaunchError) as caught:
        vertex_api(Vertex(google.PermissionDenied("hush-hush-hush is refused")), Clock()).create(JOB)
    assert "hush-hush" not in str(caught.value) and "[removed]" in str(caught.value)
