"""The what-if service: the latest requests, replayed under other settings beside the service."""
