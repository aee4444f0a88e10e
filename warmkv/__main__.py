"""`python -m warmkv`: the same as the `warmkv` script."""

from warmkv.cli import main

main()
