"""How workers agree on who trains together: laws, agreement, liveness and the stores they share. No process group."""
