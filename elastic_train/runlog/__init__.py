"""The records of a run: events, one JSON object per line, and the use of its time. The lowest of all folders."""
