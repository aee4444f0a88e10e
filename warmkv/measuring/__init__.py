"""What the engine does on this machine, in seconds and bytes: `warmkv bench` for people, `warmkv profile` for the
simulator. Both time the real engine's own steps; long contexts start from synthetic keys and values.
"""
