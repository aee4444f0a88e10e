"""A rendered overlay that every rule passes: what the shipped ones have in common, small enough to read."""

from __future__ import annotations

from typing import Any

import yaml

DOCUMENT = """
proxy_location: EveryNode
http_options: {host: 0.0.0.0, port: 8400}
applications:
- name: warmkv
  route_prefix: /
  import_path: warmkv.platform.application:build
  args:
    model: {path: tiny}
    gateway: {host: 0.0.0.0, tenants_file: /etc/warmkv/tenants/tenants.yaml}
    cluster: {replicas: 2, gpus_per_replica: 1}
    prefix_cache:
      host: {memory_bytes: 1GiB}
      disk: {path: /var/warmkv/blocks, memory_bytes: 8GiB}
"""

MANIFESTS = """
apiVersion: v1
kind: Secret
metadata: {name: warmkv-salt, namespace: warmkv}
data: {salt: c2FsdA==}
---
apiVersion: v1
kind: Secret
metadata: {name: warmkv-tenants, namespace: warmkv}
data: {tenants.yaml: e30=}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: extra, namespace: warmkv}
data: {LEVEL: info}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: warmkv, namespace: warmkv}
spec:
  minAvailable: 1
  selector: {matchLabels: {app: warmkv, part: replica}}
---
apiVersion: ray.io/v1
kind: RayService
metadata: {name: warmkv, namespace: warmkv}
spec:
  rayClusterDeletionDelaySeconds: 780
  serveConfigV2: ""
  rayClusterConfig:
    rayVersion: 2.60.0
    headGroupSpec:
      rayStartParams: {num-cpus: "0"}
      template:
        metadata: {labels: {app: warmkv, part: head}}
        spec:
          volumes:
          - {name: tenants, secret: {secretName: warmkv-tenants}}
          containers:
          - name: ray-head
            image: registry.example.com:5000/warmkv:0.1.0
            envFrom: [{configMapRef: {name: extra}}]
            env:
            - {name: WARMKV_SALT, valueFrom: {secretKeyRef: {name: warmkv-salt, key: salt}}}
            volumeMounts: [{name: tenants, mountPath: /etc/warmkv/tenants}]
            resources:
              limits: {cpu: "1", memory: 4Gi}
    workerGroupSpecs:
    - groupName: h100
      replicas: 2
      minReplicas: 2
      maxReplicas: 2
      rayStartParams: {object-store-memory: "268435456"}
      template:
        metadata: {labels: {app: warmkv, part: replica}}
        spec:
          terminationGracePeriodSeconds: 90
          nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
          volumes:
          - {name: tenants, secret: {secretName: warmkv-tenants}}
          - {name: blocks, emptyDir: {sizeLimit: 20Gi}}
          containers:
          - name: ray-worker
            image: warmkv@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
            env:
            - {name: WARMKV_SALT, valueFrom: {secretKeyRef: {name: warmkv-salt, key: salt}}}
            volumeMounts:
            - {name: tenants, mountPath: /etc/warmkv/tenants}
            - {name: blocks, mountPath: /var/warmkv}
            lifecycle: {preStop: {exec: {command: [warmkv, k8s, drain]}}}
            resources:
              limits: {cpu: "4", memory: 16Gi, nvidia.com/gpu: "1"}
"""


class Overlay:
    """Objects to break in one place; `text` renders them."""

    def __init__(self) -> None:
        self.objects: list[Any] = list(yaml.safe_load_all(MANIFESTS))
        self.document: Any = yaml.safe_load(DOCUMENT)
        self.settings = self.document["applications"][0]["args"]
        self.service = self.objects[-1]
        cluster = self.service["spec"]["rayClusterConfig"]
        self.worker = cluster["workerGroupSpecs"][0]
        self.pod = self.worker["template"]["spec"]
        self.box = self.pod["containers"][0]
        self.head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
        self.limits = self.box["resources"]["limits"]

    @property
    def text(self) -> str:
        if self.service["spec"]["serveConfigV2"] == "":
            self.service["spec"]["serveConfigV2"] = yaml.safe_dump(self.document)
        return yaml.safe_dump_all(self.objects)
