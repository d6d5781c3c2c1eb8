"""What is kept on disk: snapshots, the run directory and whose it is, weights in other formats."""
