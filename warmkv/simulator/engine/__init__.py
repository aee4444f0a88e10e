"""One simulated engine: how batches are formed, and the decode batch that advances many steps at once."""
