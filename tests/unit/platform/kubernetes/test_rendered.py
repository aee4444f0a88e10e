"""What is read of rendered manifests: quantities as Kubernetes reads them, and how many pods a group has."""

from __future__ import annotations

import pytest

from tests.unit.platform.kubernetes.good import Overlay
from warmkv.platform.kubernetes import fields
from warmkv.platform.kubernetes.rendered import LARGEST, Group, quantity, read, with_model
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
