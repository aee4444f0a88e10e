"""Read request bodies within limits, parse and tokenize them beside the event loop."""
