"""Who says in advance that this node may be taken away: clouds, schedulers, a file; and the thread that asks them."""
