"""Races against what a user would pick instead; each script writes one JSON with the machine's identity."""
