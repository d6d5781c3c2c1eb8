"""Drills: faults injected into a real job by a seeded schedule.

`nodes` and `network` are what a job runs on, `cluster` is the job; `injection`, `faults`, `environment_faults` and
`catalogue` say what is done to it, `schedule` when, and `drill` does all of it, live. `tools/audit` then reads what was
left.
"""
