"""Load a model, refuse what would be computed wrongly, and check the engine against it."""
