"""The contestants and the parts of `engine_race.py`."""
