"""Gateways and replicas in virtual time, driven by SimPy."""
