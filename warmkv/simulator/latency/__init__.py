"""Step times of a continuously batching server, fitted to measured request times."""
