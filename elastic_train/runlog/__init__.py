"""What a run writes down of itself: events, one JSON object per line, and where its time went. Below all others."""
