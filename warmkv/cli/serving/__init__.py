"""Serve a model, here or for a cluster, and what a service needs."""
