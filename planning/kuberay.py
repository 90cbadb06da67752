"""Manifests of the KubeRay operator for planned fleets: a RayJob a pool, `stemma deploy` in each.

A router has one kind of engine, so each pool is a job of its own, in parts of as many replicas as a
router takes; a service is before each part. docs/serve/cluster.md says what must be put in.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ..cluster.settings import MAX_REPLICAS

_IMAGE = "registry.example/stemma-ray:2.60.0"


@dataclass(frozen=True, slots=True)
class DeployedPool:
    """Replicas of one kind. `flags`: of their engines; `gpus`: of each replica."""

    name: str
    num_replicas: int
    gpus: int
    flags: tuple[str, ...]

    def parts(self) -> list[int]:
        """Replicas of each router, about as many."""
        num = -(-self.num_replicas // MAX_REPLICAS)
        return [(self.num_replicas + index) // num for index in range(num)]

    def command(self, num_replicas: int, model: str) -> list[str]:
        """What deploys one part."""
        return [
            "stemma", "deploy", "--host", "0.0.0.0", "--port", "8000",
            "--replicas", str(num_replicas), "--ray-gpus", str(self.gpus), "--device", "cuda",
            *self.flags, "--model", model,
        ]  # fmt: skip


def manifest(pools: Sequence[DeployedPool], model: str) -> str:
    """YAML of all parts of all pools. `model`: as the containers see it."""
    parts = [(pool, number, num) for pool in pools for number, num in enumerate(pool.parts())]
    return "---\n".join(_part(pool, number, num, model) for pool, number, num in parts)


def _part(pool: DeployedPool, number: int, num_replicas: int, model: str) -> str:
    name = f"stemma-{pool.name}-{number}"
    return f"""\
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: {name}
spec:
  entrypoint: >-
    {shlex.join(pool.command(num_replicas, model))}
  shutdownAfterJobFinishes: true
  backoffLimit: 100
  rayClusterSpec:
    rayVersion: "2.60.0"
    headGroupSpec:
      rayStartParams:
        num-cpus: "0"
      template:
        metadata:
          labels:
            app: {name}-head
        spec:
          containers:
            - name: ray-head
              image: {_IMAGE}
              ports:
                - {{containerPort: 8000, name: http}}
              env: &env
                - {{name: RAY_AUTH_MODE, value: token}}
                - name: RAY_AUTH_TOKEN
                  valueFrom: {{secretKeyRef: {{name: stemma, key: ray-token}}}}
                - name: STEMMA_API_KEY
                  valueFrom: {{secretKeyRef: {{name: stemma, key: api-key}}}}
    workerGroupSpecs:
      - groupName: {pool.name}
        replicas: {num_replicas}
        minReplicas: {num_replicas}
        maxReplicas: {num_replicas}
        rayStartParams: {{}}
        template:
          spec:
            nodeSelector:
              stemma.example/gpu: {pool.name}
            containers:
              - name: ray-worker
                image: {_IMAGE}
                env: *env
                resources:
                  limits: {{nvidia.com/gpu: {pool.gpus}}}
                volumeMounts:
                  - {{name: models, mountPath: /models, readOnly: true}}
            volumes:
              - name: models
                persistentVolumeClaim: {{claimName: models}}
---
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  selector:
    app: {name}-head
  ports:
    - {{name: http, port: 80, targetPort: 8000}}
"""
