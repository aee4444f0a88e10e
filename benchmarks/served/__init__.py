"""What the race through HTTP is made of: the load, the servers that are raced, and what their processes use."""
