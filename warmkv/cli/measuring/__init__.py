"""Measure quality, speed, and the profile of this machine."""
