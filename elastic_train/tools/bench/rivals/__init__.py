"""What a good user would run in this package's place, as programs of their own: none of them uses it to train."""
