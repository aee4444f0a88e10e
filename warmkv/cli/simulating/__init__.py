"""Replay traffic, vary what it met, and plan by it."""
