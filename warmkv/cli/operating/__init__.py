"""Change and watch a service that runs."""
