"""Traffic against a running service, by its real clients."""
