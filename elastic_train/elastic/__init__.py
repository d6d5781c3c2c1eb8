"""The ring around the training: membership, forming groups anew, restoring, leaving, own loops."""
