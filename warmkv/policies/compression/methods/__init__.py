"""Compression methods, one file each. Importing a file registers its method, without torch."""
