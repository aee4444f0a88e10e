"""The prefixes a replica keeps warm: KV blocks under their chained hashes, on the device, in host memory, on disk.

`policies/prefix_cache.py` and `policies/prefix_tree/` decide what is found, kept, moved and given up; bytes are here.
"""

from warmkv.replicas.block_store.identity import Identity
from warmkv.replicas.block_store.reads import WarmPrefix
from warmkv.replicas.block_store.store import BlockStore

__all__ = ["BlockStore", "Identity", "WarmPrefix"]
