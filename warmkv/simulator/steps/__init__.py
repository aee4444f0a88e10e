"""Seconds of an engine step: linear laws, a roofline of a GPU, and the profile that `warmkv profile` writes."""
