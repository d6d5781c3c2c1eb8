"""What is trained and how: data, model, state, one step and its reduction. Knows nothing of joins and losses."""
