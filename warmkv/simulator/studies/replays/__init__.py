"""One replay: its variants, step times and figures, and how it agrees with what was measured."""
