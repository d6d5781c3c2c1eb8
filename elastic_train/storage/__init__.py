"""Everything on disk: snapshots, the run directory and its owner, weights in other formats."""
