"""Advance notices that this node may be taken away (from clouds, schedulers, files), and the thread that polls them."""
