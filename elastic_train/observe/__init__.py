"""What a person sees: log lines, the progress bar, Prometheus metrics, `elastic-train status`."""
