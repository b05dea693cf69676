"""Logs of a job's hosts: one file per host and attempt, also where all hosts share the run directory."""

from infra.launch.worker import log_name, run


def test_attempts_are_counted(tmp_path, monkeypatch):
    monkeypatch.delenv("REPRO_HOSTS", raising=False)
    for attempt in (1, 2):
        assert run("platform", tmp_path, []) == 0  # any module that prints and ends
        assert len((tmp_path / "logs" / f"worker-000{attempt}.log").read_text()) > 5


def test_hosts_that_share_a_directory_have_files_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("REPRO_HOSTS", "16")
    names = []
    for host in ("1", "11", "1"):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", host)
        names.append(log_name(tmp_path))
        (tmp_path / names[-1]).touch()
    assert names == ["worker-0001-host1.log", "worker-0001-host11.log", "worker-0002-host1.log"]
    monkeypatch.delenv("JOB_COMPLETION_INDEX")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    assert log_name(tmp_path) == "worker-0001-host0.log"
