"""Drills: faults injected into a real job by a seeded schedule.

A job (`cluster`) runs on `nodes` and a `network`. `injection`, `faults`, `environment_faults` and `catalogue` define
the faults, `schedule` their times, and `drill` runs it all, live. `tools/audit` then reads what is left.
"""
