"""The Kubernetes objects, as far as podman can run them.

`podman kube play` runs pods, deployments, claims, config maps and secrets. It has no namespaces, services, policies
and stateful sets, so here Redis is a pod named ``redis``, a name that podman's network resolves, with the pod template
of the stateful set. Podman 4.3 does not expand ``$(NAME)``, so that is done here, and reads the name of a seccomp
profile from an annotation. The rest of the pod templates is played as it is, except ports.
"""

from __future__ import annotations

import copy
import json
import secrets
from base64 import b64encode
from pathlib import Path
from typing import Any

import yaml

from tests.containers.browser import MADE_BY_A_SCRIPT, PROFILE, check_sandbox
from tests.containers.checks import Checks, Failed, wait_for
from tests.containers.compose import check_confined, check_flower, container_logs
from tests.containers.crawls import NETWORKS, Api, Site, address_of
from tests.containers.engine import ROOT, Podman

FILE = ROOT / "deploy" / "kubernetes" / "shoal.yaml"
BROWSER_FILE = ROOT / "deploy" / "kubernetes" / "browser.yaml"
NETWORK = "shoal-kubernetes"
RUN_ID = "pods"
UNKNOWN_TO_PODMAN = {"Namespace", "Service", "NetworkPolicy"}


class Cluster:
    """What podman makes of the objects."""

    def __init__(self, podman: Podman, folder: Path) -> None:
        self._podman = podman
        self._folder = folder
        self.token = secrets.token_hex(16)
        self.flower_password = secrets.token_hex(16)
        self._redis_password = secrets.token_hex(16)
        objects = [each for each in yaml.safe_load_all(FILE.read_text()) if each["kind"] not in UNKNOWN_TO_PODMAN]
        secret = {
            "token": self.token,
            "metrics-token": secrets.token_hex(16),
            "redis-password": self._redis_password,
            "flower-auth": f"admin:{self.flower_password}",
        }
        encoded = {name: b64encode(value.encode()).decode() for name, value in secret.items()}
        podman("secret", "create", "shoal", "-", stdin=json.dumps(encoded))  # the form that podman 4.3 reads
        self._config_maps = [self._config_map(each) for each in objects if each["kind"] == "ConfigMap"]
        self._config_maps += [
            _named("ConfigMap", "shoal-run", data={"spider": "spider.py", "run-id": RUN_ID}),
            _named("ConfigMap", "shoal-spiders", data={
                "spider.py": (ROOT / "tests" / "containers" / "spider.py").read_text()
            }),
        ]  # fmt: skip
        self._workloads = {each["metadata"]["name"]: each for each in objects if "template" in each.get("spec", {})}

    @staticmethod
    def _config_map(found: dict[str, Any]) -> dict[str, Any]:
        changed = {"CELERY_TASK_RATE_LIMIT": "none", "SHOAL_DOWNLOAD_DELAY": "0", "SHOAL_SERVE__ALLOW": NETWORKS}
        return _named("ConfigMap", found["metadata"]["name"], data={**found["data"], **changed})

    def play(self, name: str, replicas: int = 1, patch: Path | None = None) -> None:
        """Start one workload. ``patch``: a file for `kubectl patch --type json`."""
        workload = copy.deepcopy(self._workloads[name])
        for change in yaml.safe_load(patch.read_text()) if patch is not None else ():
            _replace(workload, change["path"].split("/")[1:], change["value"])
        template = workload["spec"]["template"]
        profile = template["spec"]["securityContext"]["seccompProfile"]
        if profile["type"] == "Localhost":
            named = f"localhost/{Path(profile['localhostProfile']).name}"  # podman knows no folders there
            template["metadata"]["annotations"] = {"seccomp.security.alpha.kubernetes.io/pod": named}
        for container in template["spec"]["containers"]:
            self._expand(container)
            container.pop("ports", None)  # podman would open them on this machine, for all pods of a deployment alike
        more: list[dict[str, Any]] = []
        if workload["kind"] == "StatefulSet":
            (claim,) = workload["spec"]["volumeClaimTemplates"]
            claim_name = claim["metadata"]["name"]
            more.append(_named("PersistentVolumeClaim", claim_name, spec=claim["spec"]))
            template["spec"]["volumes"] = [{"name": claim_name, "persistentVolumeClaim": {"claimName": claim_name}}]
            workload = _named("Pod", name, spec=template["spec"])
        else:
            workload["spec"]["replicas"] = replicas
        file = self._folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump_all([*self._config_maps, *more, workload]))
        self._podman("kube", "play", "--network", NETWORK, "--seccomp-profile-root", str(PROFILE.parent), str(file))

    def remove(self, app: str) -> None:
        self._podman("pod", "rm", "--force", "--time", "0", *(pod["Id"] for pod in self._pods(app)))

    def _expand(self, container: dict[str, Any]) -> None:
        known = {"REDIS_PASSWORD": self._redis_password, "WORKER_SPIDER": "spider.py", "WORKER_RUN_ID": RUN_ID}

        def expand(text: str) -> str:
            for name, value in known.items():
                text = text.replace(f"$({name})", value)
            return text

        container["args"] = [expand(word) for word in container.get("args", ())]
        for variable in container.get("env", ()):
            if "value" in variable:
                variable["value"] = expand(variable["value"])

    def containers(self, app: str) -> list[str]:
        """Those of the workload, without the ones that hold the networks of its pods."""
        return [
            container["Id"]
            for pod in self._pods(app)
            for container in pod["Containers"]
            if container["Id"] != pod["InfraContainerID"]
        ]

    def address(self, app: str) -> str:
        """Of its first pod, in podman's network."""
        return address_of(self._podman, self._pods(app)[0]["InfraContainerID"])

    def _pods(self, app: str) -> list[dict[str, Any]]:
        names = self._podman("pod", "ps", "--format", "{{.Name}}").split()
        pods = [name for name in names if name == app or name.startswith(f"{app}-pod")]
        return [json.loads(self._podman("pod", "inspect", name)) for name in pods]


def _replace(found: Any, path: list[str], value: Any) -> None:
    *parents, last = (int(part) if part.isdigit() else part for part in path)
    for part in parents:
        found = found[part]
    assert last in found, path
    found[last] = value


def _named(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **more}


def check_kubernetes(podman: Podman, checks: Checks, folder: Path) -> None:
    cluster = Cluster(podman, folder)
    podman("network", "create", NETWORK)
    try:
        with checks.step("Redis, the API, Celery workers and Flower start"):
            cluster.play("redis")
            cluster.play("shoal-api")
            cluster.play("shoal-celery-worker", 2)
            cluster.play("flower")
            api = Api(f"http://{cluster.address('shoal-api')}:8000", cluster.token)
            api.wait_ready()
            api.wait_for_workers(2)
        site = Site(podman, NETWORK)
        with checks.step("Celery crawls the site"):
            site.check("celery", api.results(api.begin(site.url("celery"), distributed=True)))
        with checks.step("Flower is closed, and opens with its password"):
            check_flower(f"http://{cluster.address('flower')}:5555", "admin", cluster.flower_password)
        with checks.step("workers of a fleet crawl the site"):
            (container,) = cluster.containers("shoal-api")
            first = ["-a", f"first={site.url(RUN_ID)}", "--run-id", RUN_ID, "--quiet"]
            spider = (ROOT / "tests" / "containers" / "spider.py").read_text()
            podman("exec", "--interactive", container, "sh", "-c", "cat > /tmp/spider.py", stdin=spider)
            podman("exec", container, "shoal", "start", "/tmp/spider.py", *first)
            cluster.play("shoal-worker", 2)
            wait_for("the end of the run", lambda: api.ask(f"/api/runs/{RUN_ID}")["state"] == "finished", 90.0)
            items = api.ask(f"/api/runs/{RUN_ID}/items?limit=1000")["items"]
            site.check(RUN_ID, [item["item"]["path"] for item in items])
            if len(cluster.containers("shoal-worker")) != 2:
                raise Failed("workers did not stay when the run was finished")
        with checks.step("containers are read-only, and nobody is root"):
            for app in ("redis", "shoal-api", "shoal-celery-worker", "shoal-worker", "flower"):
                check_confined(podman, cluster.containers(app))
        with checks.step("the API with Chromium renders a page in a sandbox"):
            cluster.remove("shoal-api")
            cluster.play("shoal-api", patch=BROWSER_FILE)
            api = Api(f"http://{cluster.address('shoal-api')}:8000", cluster.token)
            api.wait_ready()
            options = {"format": "fields", "fields": {"path": "h1"}, "render": {"wait_for": 1500}}
            session = api.begin(site.url("script"), distributed=False, options=options)
            check_sandbox(podman, *cluster.containers("shoal-api"))
            if (found := api.results(session)) != [MADE_BY_A_SCRIPT]:
                raise Failed(str(found))
            check_confined(podman, cluster.containers("shoal-api"))
    except BaseException:
        print(container_logs(podman), flush=True)
        raise
