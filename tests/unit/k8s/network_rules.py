"""What production means for network policies: rules as those of `rules.py`, which lists them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tests.unit.k8s.manifests import Manifests, Object

GATEWAY_NAME = "gateway.networking.k8s.io/gateway-name"
"""Label of the pods that Istio runs for a Gateway, in the Gateway's namespace."""

OF_THE_CONTROLLER = {53, 15012}
"""Ports at which those pods ask for names, and istiod for routes and certificates."""


def traffic_is_listed(manifests: Manifests) -> Iterator[str]:
    """Check that one policy denies everything, and that only a Gateway's pods let in whoever comes."""
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in manifests.kind("NetworkPolicy")}
    deny = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    if deny not in policies.values():
        yield "what no policy names is let through"
    for name, spec in policies.items():
        is_way_in = selects(spec["podSelector"], {GATEWAY_NAME: "any"}) and spec["podSelector"]
        if not is_way_in and any("from" not in rule for rule in spec.get("ingress", ())):
            yield f"{name} lets everybody in"


def a_gateway_is_let_through(manifests: Manifests) -> Iterator[str]:
    """Check that the pods of a Gateway are reached at its listeners, and reach its controller and the worker pods."""
    policies = [policy["spec"] for policy in manifests.kind("NetworkPolicy")]
    for gateway in manifests.kind("Gateway"):
        name = gateway["metadata"]["name"]
        pods = {GATEWAY_NAME: name}
        own = [spec for spec in policies if selects(spec["podSelector"], pods)]
        entries = [rule for spec in own for rule in spec.get("ingress", ()) if "from" not in rule]
        exits = [rule for spec in own for rule in spec.get("egress", ())]
        if closed := {listener["port"] for listener in gateway["spec"]["listeners"]} - ports(entries):
            yield f"nobody reaches the Gateway {name} at {closed}"
        if closed := OF_THE_CONTROLLER - ports(exits):
            yield f"the Gateway {name} reaches nothing at {closed}"
        for group in manifests.workers:
            labels = group["template"]["metadata"]["labels"]
            to_workers = [rule for rule in exits if is_peer(rule["to"], labels)]
            theirs = [spec for spec in policies if selects(spec["podSelector"], labels)]
            admitting = [
                rule for spec in theirs for rule in spec.get("ingress", ()) if is_peer(rule.get("from", ()), pods)
            ]
            if "serve" not in ports(to_workers) & ports(admitting):
                yield f"the Gateway {name} does not reach {group['groupName']}"


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Return True if a selector, of labels and of keys that must exist, selects pods with these labels."""
    keys = [one["key"] for one in selector.get("matchExpressions", ()) if one["operator"] == "Exists"]
    return selector.get("matchLabels", {}).items() <= labels.items() and labels.keys() >= set(keys)


def is_peer(peers: Sequence[Object], labels: Mapping[str, str]) -> bool:
    """Return True if pods of the same namespace with these labels are among the peers of a rule."""
    return any(
        "namespaceSelector" not in peer and "podSelector" in peer and selects(peer["podSelector"], labels)
        for peer in peers
    )


def ports(rules: list[Object]) -> set[int | str]:
    """Return the TCP ports of rules."""
    return {port["port"] for rule in rules for port in rule.get("ports", ()) if port["protocol"] == "TCP"}
