"""Sizes of a service that hold its objectives."""
