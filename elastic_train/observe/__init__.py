"""The views of a run: log lines, the progress bar, Prometheus metrics, `elastic-train status`."""
