"""Storage formats, one file each. Importing a file registers its formats, without torch."""
