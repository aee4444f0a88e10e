"""What trains and measures the tiny model that warmkv ships; not part of the package."""
