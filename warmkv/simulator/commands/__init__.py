"""The simulator's commands, one file each. What they need is imported when they run, so that help is instant."""
