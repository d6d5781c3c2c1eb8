"""Whether a run kept its promises, read from what it left behind, and pages that show it.

`history` reads every file of a run; `audit` is the verdict, by the `*_checks` of each theme; `lost_time`
is goodput by cause, `report` the page, `watching` the live view. `record` is the folder in which a drill records what
it did.
"""
