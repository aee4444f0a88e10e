"""Constrained answers (structured outputs): from what a client asks for to the tokens that may be drawn next.

Gateways compile a constraint to refuse what cannot be, replicas to compute masks; both by llguidance, with one set of
limits. Nothing here imports torch but `masks`.
"""
