"""Many points of a configuration: grids and searches, their folders, and two of them compared."""
