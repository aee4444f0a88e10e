"""Questions asked of a trace: replay it, sweep, tune, compare, verify, or measure hit rates alone."""
