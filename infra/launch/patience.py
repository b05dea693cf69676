"""Calls to a cloud's API server: passing trouble is waited out, everything else is one error that says what to do.

    found = patiently(lambda: client.get_custom_job(name=name), judge=judge_google, what="Vertex AI, asked for the job")

`judge` looks at an exception and says what it means; what it does not know goes on as it is. The surprising thing: a job
goes on while its API does not answer, so giving up here never ends one; the same command takes it over again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from infra.errors import LaunchError
from infra.progress import clock
from infra.redact import redact

T = TypeVar("T")
PASSING_CODES = (408, 429, 500, 502, 503, 504)
LONGEST_SECONDS = 1800.0
LONGEST_PAUSE = 60.0
CALL_SECONDS = 60.0  # of one request; a connection that is silently dropped would hang for ever
LATER = (
    "run the same command again when it answers: a job that was started goes on meanwhile, and is taken over"
)


@dataclass(frozen=True)
class Judgement:
    """What an exception of a client means. `passing`: asking again may help. `code`: HTTP status, 0 without an answer."""

    passing: bool
    words: str
    remedy: str = "see the message of the API"
    code: int = 0


def judge_kubernetes(error: Exception) -> Judgement | None:
    """Exceptions of the kubernetes client and of urllib3 below it."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError, MaxRetryError, SSLError

    if isinstance(error, ApiException):
        code = int(error.status or 0)
        words = f"{code} {error.reason}: {str(error.body or '')[:300]}".rstrip(": ")
        remedy = {
            401: "renew the credentials: `gcloud container clusters get-credentials CLUSTER --region REGION`",
            403: "your account lacks the right; `kubectl auth can-i create jobsets` asks for it",
        }.get(code, "see the message of the API server")
        return Judgement(code in PASSING_CODES or code == 0, words, remedy, code)
    if isinstance(error, MaxRetryError) and isinstance(error.reason, SSLError):
        return Judgement(
            False, f"its certificate was not accepted: {error.reason}", "check the kubeconfig's cluster"
        )
    if isinstance(error, (HTTPError, ConnectionError, TimeoutError)):
        return Judgement(True, f"no answer: {error}")
    return None


def judge_google(error: Exception) -> Judgement | None:
    """Exceptions of google-api-core and google-auth."""
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, RefreshError, TransportError

    if isinstance(error, GoogleAPICallError):
        code = int(error.code or 0)
        remedy = {
            400: "the request was not accepted; compare `--dry-run` with the message",
            401: "renew the credentials: `gcloud auth application-default login`",
            403: "your account needs roles/aiplatform.user in launch.project, and the API must be enabled",
            404: "check launch.project and launch.region",
        }.get(code, "see the message of the API")
        return Judgement(code in PASSING_CODES, f"{code} {error.message}"[:400], remedy, code)
    if isinstance(error, (RetryError, TransportError)):
        return Judgement(True, f"no answer: {error}")
    if isinstance(error, (RefreshError, DefaultCredentialsError)):
        return Judgement(False, f"the Google credentials were not accepted: {error}",
                         "run `gcloud auth application-default login`")  # fmt: skip
    if isinstance(error, GoogleAuthError):
        return Judgement(False, str(error), "run `gcloud auth application-default login`")
    if isinstance(error, (ConnectionError, TimeoutError)):
        return Judgement(True, f"no answer: {error}")
    return None


def patiently(
    call: Callable[[], T],
    *,
    judge: Callable[[Exception], Judgement | None],
    what: str,
    remedies: dict[int, str] | None = None,
    accept: Callable[[Judgement, bool], bool] = lambda judgement, tried_before: False,
    longest: float = LONGEST_SECONDS,
    say: Callable[[str], None] = print,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> T | None:
    """What `call` returns; passing trouble is waited out for `longest` seconds, with pauses of 1, 2, 4 … 60.

    None where `accept(judgement, tried_before)` says that an error is an answer (gone, or made by an earlier try).
    `remedies`: by HTTP status, in place of the judge's. Raises LaunchError that starts with `what`.
    """
    deadline, pause, tried = now() + longest, 1.0, False
    while True:
        try:
            return call()
        except Exception as e:
            judgement = judge(e)
            if judgement is None:
                raise
        if accept(judgement, tried):
            return None
        words = redact(judgement.words)
        if not judgement.passing:
            remedy = (remedies or {}).get(judgement.code, judgement.remedy)
            raise LaunchError(f"{what}: {words}", remedy) from None
        if now() + pause > deadline:
            raise LaunchError(
                f"{what}: no useful answer for {clock(longest)}; last: {words}", LATER
            ) from None
        if pause > 2:
            say(f"{what}: {words}; again in {clock(pause)}")
        sleep(pause)
        pause, tried = min(2 * pause, LONGEST_PAUSE), True
