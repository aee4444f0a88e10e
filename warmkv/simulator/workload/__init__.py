"""Requests to replay: read from an access log or a trace, or generated."""
