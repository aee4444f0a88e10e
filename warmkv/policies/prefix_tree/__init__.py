"""A radix tree over runs of blocks: which prefixes a replica keeps, in which tiers, and what goes first.

A node is a run of blocks of one size that no prompt has left or ended in. Of each node a tier holds the leading blocks
(`Copy.held`), so that evicting the end of a run shortens it and splits nothing. A breakpoint's tail and column sums are
nodes of one block. Operations take the nodes of a prompt, its path, and cost O(nodes on it), whatever its blocks. A
simulated replica finds paths by the numbers of runs, a live one by the keys of blocks (`radix.py`); it is told what
came and left, so that it can do likewise with the bytes.

1. Presence is prefix-closed: where a tier holds blocks of a node, it holds all of the node's parent.
2. A parent lives at least as long as its children, unless these came from another replica; then it stays until they go.
3. What a request reads is neither evicted nor expired. What is lost goes all the same, with what is behind it.
4. A tier's bytes are the sum over its blocks, and never exceed its capacity.
5. A mark is readable until its own deadline, and only while its block is held.
6. No tenant is evicted below its share by another one.
7. Copies in all tiers have one lifetime: it belongs to the node. Moving between tiers changes nothing in it.
8. When `expire` is called changes nothing: what has outlived its TTL is not found before, either.
"""
