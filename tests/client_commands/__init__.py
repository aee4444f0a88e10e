"""Clients that are programs of their own, run unmodified against `warmkv serve`: `make clients-by-command`."""
