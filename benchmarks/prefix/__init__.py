"""What `prefix_race.py` measures: the tiers of the prefix cache, and its index."""
