"""The loop (loop.py) and the ring around it (ring.py): membership, forming groups anew, restoring, leaving."""
