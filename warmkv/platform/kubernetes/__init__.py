"""Kubernetes manifests: rendered objects, the rules that explain what is wrong with them, and overlays from a plan."""
