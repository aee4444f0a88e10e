"""The engine: one thread that schedules, computes and streams the requests of a replica."""
