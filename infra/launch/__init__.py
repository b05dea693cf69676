"""Launching a job: one interface, three targets, XManager behind each.

handle = launch(job, target_config)       # infra.launch.targets
handle.status(); handle.logs(20); handle.cancel(); handle.wait()
"""
