"""What is read of rendered manifests: quantities as Kubernetes reads them, and how many pods a group has."""

from __future__ import annotations

import pytest
from ray._private import ray_constants

from tests.unit.platform.kubernetes.good import Overlay
from warmkv.platform.kubernetes import fields
from warmkv.platform.kubernetes.rendered import (
    LARGEST,
    OBJECT_STORE_MOST,
    OBJECT_STORE_SHARE,
    Group,
    quantity,
    read,
    with_model,
)
from warmkv.platform.kubernetes.rules import check

QUANTITIES = {
    2: 2,
    0.5: 0.5,
    "16Gi": 16 << 30,
    "1Ei": 1 << 60,
    "64M": 64e6,
    "1E": 1e18,
    "3000m": 3,
    "100u": 1e-4,
    "5n": 5e-9,
    "129e6": 129e6,
    "1E3": 1000,
    "1.5e-3": 0.0015,
    ".5": 0.5,
    "1.": 1,
    "+1": 1,
    "1e99": LARGEST,
}


@pytest.mark.parametrize(("text", "value"), QUANTITIES.items())
def test_quantities_are_read_as_kubernetes_reads_them(text: object, value: float) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "1K", "1e", "1e1.5", "1Gib", "1 Gi", "0x10", "-1", "4 gigabytes"])
def test_what_is_no_quantity_is_not_read(text: str) -> None:
    assert quantity(text) is None


def worker(overlay: Overlay) -> Group:
    (found,) = read(overlay.text, fields.known()).services[0].workers
    return found


def test_a_replica_of_several_hosts_is_as_many_pods() -> None:
    overlay = Overlay()
    overlay.worker["numOfHosts"] = 2
    overlay.settings["cluster"]["replicas"] = 4
    assert (worker(overlay).most_pods, worker(overlay).least_pods) == (4, 4)
    found = check(with_model(read(overlay.text, fields.known())))
    assert found == [], "two of KubeRay's replicas have room for four of ours"


def test_a_limit_that_cannot_be_read_is_not_called_missing() -> None:
    overlay = Overlay()
    overlay.limits["memory"] = "16 gigabytes"
    found = check(with_model(read(overlay.text, fields.known())))
    assert {finding.rule for finding in found} == {"quantities"}


def test_the_object_store_is_rays() -> None:
    """Take what is set, else Ray's default, and no more than /dev/shm has room for."""
    assert ray_constants.DEFAULT_OBJECT_STORE_MEMORY_PROPORTION == OBJECT_STORE_SHARE
    assert ray_constants.DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES == OBJECT_STORE_MOST
    overlay = Overlay()
    assert worker(overlay).object_store(16 << 30) == 256 << 20
    overlay.worker["rayStartParams"] = {}
    group = worker(overlay)
    assert group.object_store(10 << 30) == 3 << 30
    assert group.object_store(1 << 50) == 200 * 10**9
    assert group.limit_for(7 << 30) == pytest.approx(10 << 30)
    overlay.pod["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}})
    overlay.box["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    group = worker(overlay)
    assert group.object_store(10 << 30) == 1 << 30
    assert group.limit_for(7 << 30) == 8 << 30
