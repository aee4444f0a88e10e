"""Rules that hold the settings against the objects around them: settings file, ports, timeouts, folders, budgets.

As in `rules.py`, which lists them, each is a function over the manifests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from warmkv.config import Config, ConfigError, parse, strict_yaml
from warmkv.platform.kubernetes.file_rules import kept_versions, read_files, tenants_mount, written_files
from warmkv.platform.kubernetes.findings import Rule, Told
from warmkv.platform.kubernetes.references import references_of
from warmkv.platform.kubernetes.rendered import (
    TEMPLATED,
    Group,
    Object,
    RenderedManifests,
    RenderedService,
    mapping,
    name_of,
)

SETTINGS_KEY = "warmkv.yaml"
SERVE_PORT = "serve"  # the name that KubeRay and the manifests give to the gateways' port
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
PROBED = ("/healthz", "/readyz")  # what a gateway answers, behind its prefix
SERVED = ("/v1", "/console", "/health", "/openapi.json", *PROBED)
PROBED_AT_THE_PROXY = "/-/healthz"
PROBED_AT_RAY = "/api/healthz"  # of its agents, at a port of theirs
OPERATORS_LABELS = "ray.io/"  # that KubeRay gives to pods, and templates do not have
NODE_TYPE, GROUP = f"{OPERATORS_LABELS}node-type", f"{OPERATORS_LABELS}group"
_URL = re.compile(r"https?://(?:[\w.-]+|\[[0-9a-f:]+\])(?::(\d+))?(/[^\s'\"?;&|)]*)")
_PART = re.compile(r"(\d+)(h|ms|m|s)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}


# --- the settings file


def settings_file(rendered: RenderedManifests) -> Told:
    """Find a ConfigMap with settings that differ from those in the Serve document."""
    for service, config in rendered.configured:
        names = {ref.name for group in service.groups for ref in references_of(group.pods) if ref.kind == "ConfigMap"}
        for name in sorted(names):
            text = mapping((rendered.find("ConfigMap", name) or {}).get("data")).get(SETTINGS_KEY)
            if text is None:
                continue
            where = f"ConfigMap/{name}: data.{SETTINGS_KEY}"
            try:
                differing = list(_differences(_plain(_read(str(text))), _plain(config)))
            except ConfigError as error:
                for line in str(error).splitlines():
                    yield where, line, "mend it, then `warmkv k8s render -c warmkv.yaml` beside the kustomization"
                continue
            if differing:
                what = f"it differs from the Serve document, which is what runs: {'; '.join(differing)}"
                todo = f"`warmkv k8s render -c {SETTINGS_KEY}` beside the kustomization; change {SETTINGS_KEY} only"
                yield where, what, todo


def _read(text: str) -> Config:
    """Read settings as pods do. Raises ConfigError."""
    try:
        tree = strict_yaml.load(text)
    except (yaml.YAMLError, ValueError) as error:  # a date that is none
        raise ConfigError(f"it is not YAML: {error}") from None
    if tree is not None and not (isinstance(tree, dict) and all(isinstance(key, str) for key in tree)):
        raise ConfigError(f"expected a mapping of sections, got {type(tree).__name__}")
    return parse(tree or {})


def _plain(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _differences(file: Mapping[str, Any], document: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield a sentence for each setting that two trees have differently; of lists only that they differ."""
    for key in sorted({*file, *document}):
        place, ours, theirs = f"{above}{key}", file.get(key), document.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from _differences(ours, theirs, f"{place}.")
        elif ours != theirs:
            plain = not isinstance(ours, dict | list) and not isinstance(theirs, dict | list)
            yield f"{place} is {_said(ours)}, there {_said(theirs)}" if plain else f"{place} is another"


def _said(value: object) -> str:
    return "not set" if value is None else f"{value:.15g}" if isinstance(value, float) else str(value)


# --- ways in


def ports(rendered: RenderedManifests) -> Told:
    """Find ports of pods, probes, services and routes that are not the port on which gateways listen."""
    for service, config in rendered.configured:
        port = config.gateway.port
        listens = f"gateways listen on {port} (gateway.port)"
        proxy = mapping(service.document.get("http_options")).get("port", port)
        if proxy != port:
            what = f"Serve's proxy has port {proxy} (http_options.port), and {listens}"
            todo = f"write the document from {SETTINGS_KEY}: `warmkv k8s render -c {SETTINGS_KEY}`"
            yield f"{service.where}: spec.serveConfigV2, http_options.port", what, todo
        for group in service.groups:
            for number, known in _ports(group).items():
                if known == SERVE_PORT and number != port:
                    todo = f"set containerPort to {port}, or gateway.port to {number}, and render again"
                    yield f"{group.where}.ports[{SERVE_PORT}]", f"the port is {number}, and {listens}", todo
            for probe in PROBES:
                for asked in sorted({asked for asked, _ in _probed(group, probe, port)}):
                    if asked != port:
                        what = f"it asks port {asked}, and {listens}: the pod would never pass"
                        yield f"{group.where}.{probe}", what, f"let it ask port {port}"
        yield from _service_ports(rendered, service, port)


def _service_ports(rendered: RenderedManifests, service: RenderedService, port: int) -> Told:
    """Compare the service for clients, and routes that lead to it."""
    spec = mapping(mapping(service.resource["spec"].get("serveService")).get("spec"))
    entries = _mappings(spec.get("ports"))
    offered = {number for group in service.workers for number in _ports(group)}
    named = {name for group in service.workers for name in _ports(group).values()}
    for entry in entries:
        target = entry.get("targetPort", entry.get("port"))
        where = f"{service.where}: spec.serveService.spec.ports[{entry.get('name', entry.get('port'))}].targetPort"
        if isinstance(target, str) and not target.isdigit():
            if offered and target not in named:
                what = f"no port of the worker pods is called {target}"
                yield where, what, f"name one that they have: {', '.join(sorted(filter(None, named)))}"
        elif int(target or 0) != port:
            what = f"it leads to port {target} of the pods, and gateways listen on {port} (gateway.port)"
            yield where, what, f"set it to {SERVE_PORT}, or to {port}"
    if not (open_ports := [entry.get("port") for entry in entries]):
        return
    for place, rule in _routed(rendered, service):
        for backend in _mappings(rule.get("backendRefs")):
            if backend.get("name") == _client_service(service) and backend.get("port") not in open_ports:
                what = f"it leads to port {backend.get('port')} of {backend['name']}, which does not have it"
                yield f"{place}.backendRefs", what, f"there are {', '.join(map(str, open_ports))}"


def paths(rendered: RenderedManifests) -> Told:
    """Find probes and routes that ask gateways for what they do not have, as without `gateway.route_prefix`."""
    for service, config in rendered.configured:
        prefix = config.gateway.route_prefix.rstrip("/")
        for group in service.groups:
            for probe in PROBES:
                for path in sorted({path for _, path in _probed(group, probe, config.gateway.port)}):
                    right = f"{prefix}/{path.rpartition('/')[2]}"
                    if path not in (right, PROBED_AT_THE_PROXY):
                        what = f"it asks for {path}, and gateways have {right} (gateway.route_prefix): it never passes"
                        yield f"{group.where}.{probe}", what, f"let it ask for {right}"
        for place, rule in _routed(rendered, service):
            if _rewrites(rule):
                continue
            for number, match in enumerate(_mappings(rule.get("matches"))):
                matched = mapping(match.get("path"))
                if not _is_served(matched, prefix):
                    what = (
                        f"it leads {matched.get('value')} to gateways, which have {prefix}/v1 (gateway.route_prefix): "
                        "clients would get 404"
                    )
                    todo = f"set it to {prefix}/v1, or rewrite the path by a filter"
                    yield f"{place}.matches[{number}].path", what, todo


def _rewrites(rule: Object) -> bool:
    """Return True if a filter of a route's rule may change the path."""
    filters = _mappings(rule.get("filters"))
    for backend in _mappings(rule.get("backendRefs")):
        filters += _mappings(backend.get("filters"))
    return any(one.get("type") == "ExtensionRef" or "path" in mapping(one.get("urlRewrite")) for one in filters)


def _is_served(matched: Object, prefix: str) -> bool:
    """Return True if some of the requests that a route matches are for what gateways have."""
    kind, value = matched.get("type", "PathPrefix"), str(matched.get("value", "/")).rstrip("/")
    if kind == "RegularExpression":
        return True
    served = [f"{prefix}{name}" for name in SERVED]
    return any(_is_below(value, one) or (kind == "PathPrefix" and _is_below(one, value)) for one in served)


def _is_below(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}/")


def route_timeouts(rendered: RenderedManifests) -> Told:
    """Find routes that end an answer before the gateway does."""
    for service, config in rendered.configured:
        longest = config.gateway.request_timeout_seconds
        for place, rule in _routed(rendered, service):
            for key in ("request", "backendRequest"):
                text = mapping(rule.get("timeouts")).get(key)
                if (seconds := _seconds(text)) and seconds <= longest:
                    what = (
                        f"the route ends a request after {text}, and an answer may take {longest:g} s "
                        "(gateway.request_timeout_seconds): clients would get an error of the route's in mid-answer"
                    )
                    todo = f"set it to {int(longest) + 60}s or more, or gateway.request_timeout_seconds below it"
                    yield f"{place}.timeouts.{key}", what, todo


def _seconds(text: object) -> float | None:
    """Read a duration of the Gateway API, as 1m30s; 0 is without a limit. None for what is no duration."""
    parts = _PART.findall(str(text))
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(int(number) * _SECONDS[unit] for number, unit in parts)


def _routed(rendered: RenderedManifests, service: RenderedService) -> Iterator[tuple[str, Object]]:
    """Yield the rules of HTTPRoutes that lead to the service for clients."""
    for one in rendered.objects:
        if one["kind"] == "HTTPRoute":
            for number, rule in enumerate(_mappings(mapping(one.get("spec")).get("rules"))):
                if any(ref.get("name") == _client_service(service) for ref in _mappings(rule.get("backendRefs"))):
                    yield f"{name_of(one)}: spec.rules[{number}]", rule


def _client_service(service: RenderedService) -> str:
    """Return the name of the Service that KubeRay points at the pods that serve."""
    metadata = mapping(mapping(service.resource["spec"].get("serveService")).get("metadata"))
    return str(metadata.get("name") or f"{service.resource['metadata']['name']}-serve-svc")


def _ports(group: Group) -> dict[int, str]:
    """Return the ports of the container that runs Ray, with their names."""
    return {entry.get("containerPort", 0): entry.get("name", "") for entry in group.box.get("ports") or ()}


def _probed(group: Group, probe: str, gateways: int) -> Iterator[tuple[int, str]]:
    """Yield the port and the path of each request of a probe that is meant for a gateway, or for Serve's proxy."""
    for port, path in _requests(mapping(group.box.get(probe)), _ports(group)):
        if path.endswith(PROBED) and (path != PROBED_AT_RAY or port == gateways):
            yield port, path


def _requests(probe: Object, ports: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """Yield the port and the path of each HTTP request of a probe, also of those in its command."""
    if http := mapping(probe.get("httpGet")):
        numbers = {name: number for number, name in ports.items()}
        port = str(numbers.get(http.get("port", ""), http.get("port")))
        if port.isdigit():
            yield int(port), str(http.get("path", "/"))
    for word in mapping(probe.get("exec")).get("command") or ():
        for port, path in _URL.findall(str(word)):
            yield int(port or 80), path


# --- ends and evictions


def drain_hook(rendered: RenderedManifests) -> Told:
    """Find worker pods without a hook that drains them: SIGTERM ends Ray, and with it every stream, at once."""
    for service, config in rendered.configured:
        if not (drain := config.cluster.drain_seconds):
            continue
        for group in service.workers:
            if not mapping(group.box.get("lifecycle")).get("preStop"):
                what = (
                    f"nothing drains the pod before it ends, and streams may take {drain:g} s (cluster.drain_seconds)"
                )
                todo = "run `warmkv k8s drain` as a preStop hook, as the base does, or set cluster.drain_seconds to 0"
                yield f"{group.where}.lifecycle", what, todo


def budgets(rendered: RenderedManifests) -> Told:
    """Find disruption budgets that never let a pod go, so that no node with one can be drained.

    Of a RayCluster's pods only a whole number that must stay can be counted: for `maxUnavailable` and percentages
    Kubernetes asks the scale subresource of their owner, and it has none. A budget that keeps a single pod is a note:
    evicting that would end the service.
    """
    for one in rendered.objects:
        if one["kind"] != "PodDisruptionBudget":
            continue
        spec = mapping(one.get("spec"))
        selector = mapping(spec.get("selector"))
        labels = mapping(selector.get("matchLabels"))
        chosen = [(least, of) for least, of in _pod_counts(rendered) if _selects(labels, of)]
        if selector.get("matchExpressions") or not chosen:
            continue  # no pods: `selectors` tells
        of_ray = any(NODE_TYPE in of for _, of in chosen)
        if of_ray and (key := _asking_for_scale(spec)):
            what = (
                f"{spec[key]} cannot be counted: a RayCluster does not tell how many pods it should have, so every "
                "eviction is refused, and no node with one can be drained"
            )
            yield f"{name_of(one)}: spec.{key}", what, "set minAvailable to a whole number, below the number of pods"
            continue
        if any(count is None for count, _ in chosen):
            continue
        least = max(1, sum(count or 0 for count, _ in chosen))
        if spec.get("maxUnavailable") in (0, "0%"):
            what = "none of its pods may ever be evicted, so no node with one can be drained"
            yield f"{name_of(one)}: spec.maxUnavailable", what, "set minAvailable instead, below the number of pods"
            continue
        stay = least if spec.get("minAvailable") == "100%" else spec.get("minAvailable")
        if not isinstance(stay, int) or stay < least:
            continue
        where = f"{name_of(one)}: spec.minAvailable"
        if least == 1 and stay == 1:
            todo = "delete it for as long as a drain takes, or have a second pod (for a head: the component gcs-ft)"
            yield where, "it keeps the only pod, so a node with that cannot be drained", todo, "note"
        else:
            what = f"{stay} pods must stay, and there may be no more than {least}: no node with one can be drained"
            todo = f"set it to {least - 1} or less, or have more pods (replicas, minReplicas)"
            yield where, what, todo


def _asking_for_scale(spec: Object) -> str:
    """Return the field of a budget for which Kubernetes must know how many pods there should be; `` where none is."""
    if spec.get("maxUnavailable") is not None:
        return "maxUnavailable"
    return "minAvailable" if isinstance(spec.get("minAvailable"), str) else ""


def _selects(wanted: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return True if labels match. Those that KubeRay adds to its pods, and are not known here, match anything."""
    known = wanted
    if NODE_TYPE in labels:
        known = {key: value for key, value in wanted.items() if key in labels or not key.startswith(OPERATORS_LABELS)}
    return bool(wanted) and known.items() <= labels.items()


def _pod_counts(rendered: RenderedManifests) -> Iterator[tuple[int | None, Mapping[str, str]]]:
    """Yield the fewest pods that each object has in service, None where that is not known, and their labels."""
    for service in rendered.services:
        for group in service.groups:
            kind, name = ("head", "headgroup") if group.head else ("worker", group.name)
            yield group.least_pods or None, {**group.pods.labels, NODE_TYPE: kind, GROUP: name}
    for one in rendered.objects:
        spec, template = mapping(one.get("spec")), one
        count: int | None = 1
        if one["kind"] in TEMPLATED:
            template = mapping(spec.get("template"))
            count = None if one["kind"] in ("DaemonSet", "Job") else spec.get("replicas", 1)
        elif one["kind"] != "Pod":
            continue
        yield count, mapping(mapping(template.get("metadata")).get("labels"))


def _mappings(value: object) -> list[Object]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


SETTINGS_RULES: tuple[Rule, ...] = (
    settings_file,
    ports,
    paths,
    route_timeouts,
    written_files,
    kept_versions,
    read_files,
    tenants_mount,
    drain_hook,
    budgets,
)
