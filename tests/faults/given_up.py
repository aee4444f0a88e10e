"""Wait until Ray has given up every node at an address: `python -m tests.faults.given_up GCS_ADDRESS NODE_ADDRESS`."""

from __future__ import annotations

import sys
from contextlib import suppress

import ray

from tests.polling import until

if __name__ == "__main__":
    gcs, address = sys.argv[1:]
    while not ray.is_initialized():
        with suppress(Exception):  # the GCS may be slow to answer while it waits for the node
            ray.init(address=gcs, log_to_driver=False)
    until(
        lambda: not any(node["Alive"] and node["NodeManagerAddress"] == address for node in ray.nodes()),
        "the node is given up",
    )
