"""Drills: harm done to a real job by a seeded schedule, and the audit that says whether the promises held.

Two halves that meet in a run directory only. One does harm: `nodes` and `network` (what a job runs on), `cluster` (the
job), `harm`, `faults`, `network_faults` and `catalogue` (what is done to it), `schedule` (when), `drill` (all of it,
live). The other looks at what was left: `history` (every file of a run, read), `audit` (the verdict), `checks` and the
`*_checks` by theme, `lost_time` (goodput by cause), `report` (the page). `record` is the folder in which the first half
tells the second what it did. Nothing outside of this package imports it but the console script.
"""
