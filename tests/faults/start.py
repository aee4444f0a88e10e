"""Start a Serve document on a running Ray: `python -m tests.faults.start GCS_ADDRESS FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray

from warmkv.platform.local import start_document

if __name__ == "__main__":
    address, document = sys.argv[1:]
    ray.init(address=address, namespace="serve", log_to_driver=False)
    start_document(json.loads(Path(document).read_text()))
