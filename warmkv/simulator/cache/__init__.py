"""The prefix blocks of simulated replicas, and the measures taken of them."""
