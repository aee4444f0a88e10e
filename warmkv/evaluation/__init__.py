"""`warmkv eval`: how well answers survive a policy, compared with all others at equal memory."""
