"""Replay traffic in virtual time with the policies of the live system. Needs neither torch nor ray."""
