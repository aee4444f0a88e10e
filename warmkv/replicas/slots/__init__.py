"""Decode slots: their memory, its bookkeeping, and the attention over it."""
