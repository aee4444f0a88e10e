"""What `routing_race.py` measures: the router's decision and its index, beside Ray Serve's prefix tree."""
