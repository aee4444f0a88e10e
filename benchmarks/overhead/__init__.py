"""What watching and tuning take from the service."""
