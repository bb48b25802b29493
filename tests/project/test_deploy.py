"""The files in deploy/ fit the code: settings, commands and probes exist."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest
import redis
import typer
import yaml
from celery.app.utils import find_app
from celery.bin.celery import celery
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from shoal import __version__
from shoal.api.celery.settings import CelerySettings, celery_settings
from shoal.api.server.app import create_app
from shoal.api.server.auth import check_binding
from shoal.cli.main import COMMANDS, app
from shoal.config import Config, env_name, flatten, load_config
from shoal.errors import ConfigError
from shoal.runs.autoscale import compose_pool
from tests.support.databases import free_port

ROOT = Path(__file__).parent.parent.parent
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
BROWSER_DOCKERFILE = (ROOT / "deploy" / "Dockerfile.browser").read_text()
COMPOSE_FILE = ROOT / "docker-compose.distributed.yml"
BROWSER_FILE = ROOT / "docker-compose.browser.yml"
COMPOSE = yaml.safe_load(COMPOSE_FILE.read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
SECCOMP_FILE = ROOT / "deploy" / "chromium-seccomp.json"
KUBERNETES_FILE = ROOT / "deploy" / "kubernetes" / "shoal.yaml"
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all(KUBERNETES_FILE.read_text()))
WORKLOADS = {o["metadata"]["name"]: o for o in OBJECTS if o["kind"] in ("Deployment", "StatefulSet")}
DOCUMENT = (ROOT / "docs" / "deploying.md").read_text()
IMAGE = f"shoal:{__version__}"
OURS = {"shoal-api", "shoal-celery-worker", "shoal-worker", "flower"}
CELERY = OURS - {"shoal-worker"}


class Asked(dict[str, str]):
    """An environment that remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return default


def known_variables() -> set[str]:
    asked = Asked()
    celery_settings(asked)
    return asked.names | {env_name(key) for key in flatten(Config())} | {"SHOAL_FLOWER_PASSWORD"}


@pytest.mark.parametrize(
    "path",
    [
        *("deploy/Dockerfile", "deploy/Dockerfile.browser", COMPOSE_FILE.name, BROWSER_FILE.name),
        *("deploy/kubernetes/shoal.yaml", "docs/deploying.md"),
    ],
)
def test_every_variable_is_one_that_the_code_reads(path: str) -> None:
    text = re.sub(r"\bSHOAL_API_PORT\b|\b(?:SHOAL|CELERY)_\*", "", (ROOT / path).read_text())  # an example of a bad one
    named = set(re.findall(r"\b(?:SHOAL|CELERY)_\w+", text))
    assert named <= known_variables(), named - known_variables()
    assert named or "Dockerfile" in path


# -- commands


def parse(words: list[str]) -> None:
    """The command and its options; nothing runs."""
    command = typer.main.get_command(app)
    with command.make_context("shoal", list(words)) as context:
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        found.make_context(name, rest, parent=context)


def shoal_commands() -> Iterator[list[str]]:
    yield re.findall(r'"([^"]+)"', re.findall(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)[-1])
    for service in SERVICES.values():
        if service.get("image") == IMAGE and "entrypoint" not in service:
            yield service["command"]
    for workload in WORKLOADS.values():
        for container in containers(workload):
            if container["image"] == IMAGE and "command" not in container:
                yield container["args"]


def containers(workload: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = workload["spec"]["template"]["spec"]["containers"]
    return found


def test_every_command_of_ours_parses() -> None:
    commands = list(shoal_commands())
    assert {words[0] for words in commands} == {"serve", "celery-worker", "worker"}
    for words in commands:
        parse(words)
    with pytest.raises(Exception, match="no-such"):
        parse(["serve", "--no-such"])


def test_every_command_that_the_document_names_is_one_of_ours() -> None:
    named = set(re.findall(r"`shoal ([\w-]+)", DOCUMENT))
    assert {"celery-worker", "worker", "autoscale"} <= named
    assert named <= {name for group in COMMANDS.values() for name in group}


def test_flower_is_a_command_of_celery_for_our_application() -> None:
    service, container = SERVICES["flower"], containers(WORKLOADS["flower"])[0]
    assert service["entrypoint"] == container["command"] == ["celery"]
    assert service["command"] == container["args"]
    with celery.make_context("celery", list(service["command"])) as context:
        assert find_app(context.params["app"]).main == "shoal"
        assert celery.get_command(context, "flower") is not None


# -- the image


def test_the_image_is_made_of_what_is_sent_and_runs_as_nobody_special() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert patterns[0] == "*"
    sent = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    copied = {word for words in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for word in words.split()}
    assert copied == sent
    assert all((ROOT / name).exists() for name in sent)
    assert not any(fnmatch(name, "*env*") for name in sent)
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == ["${PYTHON_IMAGE}"] * 2
    assert "\nARG PYTHON_IMAGE=python:3.11-slim\n" in DOCKERFILE
    assert interpolated(SERVICES["api"]["build"]["args"]["PYTHON_IMAGE"]) == "python:3.11-slim"
    user = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)[-1]
    assert user == ("10001", "10001")
    assert "HEALTHCHECK" in DOCKERFILE
    assert not re.search(r"(?i)(token|password|secret)=", DOCKERFILE)


def test_the_image_with_a_browser_adds_locked_packages_to_the_other_one() -> None:
    assert re.findall(r"^FROM (\S+)", BROWSER_DOCKERFILE, re.MULTILINE) == [IMAGE]
    assert re.findall(r"^USER (\S+)$", BROWSER_DOCKERFILE, re.MULTILINE)[-1] == "10001:10001"
    assert f"-t {IMAGE}-browser ." in BROWSER_DOCKERFILE
    (names,) = re.findall(r"/\^\(([\w|-]+)\)==/", BROWSER_DOCKERFILE)
    if f"\nplaywright=={version('playwright')} " in (ROOT / "requirements" / "test.txt").read_text():
        needed = {re.split(r"\W", each.replace("-", "_"))[0] for each in requires("playwright") or []}
        assert set(names.split("|")) == {"playwright"} | needed
    script = re.findall(r"awk '(.*?)' /tmp/locked.txt", BROWSER_DOCKERFILE)[0]
    done = subprocess.run(
        ["awk", script, ROOT / "requirements" / "test.txt"], capture_output=True, text=True, check=True
    )
    assert {line.partition("==")[0] for line in done.stdout.splitlines() if "==" in line} == set(names.split("|"))
    assert "--hash=sha256:" in done.stdout


def test_the_compose_file_with_a_browser_changes_the_processes_that_fetch() -> None:
    changed = yaml.safe_load(BROWSER_FILE.read_text())["services"]
    assert set(changed) == {"api", "celery-worker", "worker"} <= set(SERVICES)
    for service in changed.values():
        assert service["image"] == f"{IMAGE}-browser"
        assert (ROOT / service["build"]["dockerfile"]).exists()
        assert set(service) <= {"image", "build", "deploy", "environment", "security_opt"}  # they stay confined
        assert service["security_opt"] == [f"seccomp={SECCOMP_FILE.relative_to(ROOT)}"]  # Compose adds it to the others


def test_the_patch_for_kubernetes_with_a_browser_changes_what_the_compose_file_changes() -> None:
    patch = yaml.safe_load((KUBERNETES_FILE.parent / "browser.yaml").read_text())
    values = {change["path"]: change["value"] for change in patch}
    assert {change["op"] for change in patch} == {"replace"}
    limits = {**yaml.safe_load(BROWSER_FILE.read_text())["services"]["api"]["deploy"]["resources"]["limits"]}
    assert values["/spec/template/spec/containers/0/image"] == f"{IMAGE}-browser"
    assert values["/spec/template/spec/containers/0/resources/limits"] == {
        "cpu": limits["cpus"], "memory": limits["memory"].replace("g", "Gi"),
    }  # fmt: skip
    profile = values["/spec/template/spec/securityContext/seccompProfile"]
    assert profile == {"type": "Localhost", "localhostProfile": f"shoal/{SECCOMP_FILE.name}"}
    for name in OURS - {"flower"}:
        for path in values:
            found: Any = WORKLOADS[name]
            for part in path.split("/")[1:]:
                found = found[int(part) if part.isdigit() else part]  # KeyError: `replace` would fail
        assert name in DOCUMENT


def test_the_seccomp_profile_allows_user_namespaces_and_little_else() -> None:
    """The form that all runtimes read: containerd ignores conditions such as capabilities, and would allow the rest."""
    profile = json.loads(SECCOMP_FILE.read_text())
    assert set(profile) == {"defaultAction", "defaultErrnoRet", "architectures", "syscalls"}
    assert (profile["defaultAction"], profile["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", errno.ENOSYS)
    everywhere, *rules = profile["syscalls"]
    assert all(set(rule) <= {"names", "action", "args", "errnoRet"} for rule in profile["syscalls"])
    assert everywhere["names"] == sorted(set(everywhere["names"]))
    assert "chroot" in everywhere["names"]
    dangerous = {"mount", "umount2", "pivot_root", "setns", "ptrace", "bpf", "perf_event_open", "keyctl", "add_key",
                 "io_uring_setup", "userfaultfd", "open_by_handle_at", "init_module", "kexec_load", "clone", "clone3",
                 "unshare", "socket", "process_vm_readv", "personality", "reboot", "move_mount", "fsopen"}  # fmt: skip
    assert not dangerous & set(everywhere["names"])
    namespaces = next(rule for rule in rules if "unshare" in rule["names"])
    assert namespaces["names"] == ["clone", "unshare"]
    new_mounts, new_cgroup, new_uts, new_ipc = 0x20000, 0x2000000, 0x4000000, 0x8000000
    (condition,) = namespaces["args"]
    assert condition == {
        "index": 0, "value": new_mounts | new_cgroup | new_uts | new_ipc, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ",
    }  # fmt: skip
    allowed = [rule for rule in rules if rule["action"] == "SCMP_ACT_ALLOW" and rule is not namespaces]
    assert {name for rule in allowed for name in rule["names"]} == {"socket"}
    assert all(rule["args"] for rule in allowed)


def test_one_image_of_this_version_and_no_moving_tags() -> None:
    images = [interpolated(service["image"]) for service in SERVICES.values()]
    images += [container["image"] for workload in WORKLOADS.values() for container in containers(workload)]
    assert {image for image in images if image.startswith("shoal")} == {IMAGE}
    assert all(re.search(r":\d", image) for image in images)
    assert f"-t {IMAGE} ." in DOCKERFILE
    assert f"-t {IMAGE} ." in DOCUMENT


# -- Compose


def interpolated(value: Any, **environment: str) -> str:
    """As Compose does it, as far as it is used here."""

    def replace(found: re.Match[str]) -> str:
        name, how, rest = found.groups()
        if name in environment:
            return environment[name]
        assert how == ":-", f"{name} has no value: {rest}"
        return rest

    return re.sub(r"\$\{(\w+)(:[-?])([^}]*)\}", replace, str(value))


TOKEN = "the-token-of-compose"
NEEDED = {
    "SHOAL_SERVE__TOKEN": TOKEN, "REDIS_PASSWORD": "p4ss", "SHOAL_FRONTIER": "redis://:p4ss@redis:6379/2",
    "SHOAL_FLOWER_PASSWORD": "fl0wer",
}  # fmt: skip
"""What Compose does not start without, as `scripts/secrets` writes it to `.env`."""


def service_environment(name: str, **environment: str) -> dict[str, str]:
    given = SERVICES[name]["environment"]
    return {key: interpolated(value, **environment) for key, value in given.items()}


def test_the_settings_of_compose_are_the_defaults_until_they_are_changed() -> None:
    environ = service_environment("api", **NEEDED)
    config = load_config(environ=environ).config
    changed = {"frontier": "redis://:p4ss@redis:6379/2", "serve.host": "0.0.0.0", "serve.token": TOKEN}
    assert config == Config().with_settings(changed)
    settings = celery_settings(environ)
    assert settings == CelerySettings(
        broker_url="redis://:p4ss@redis:6379/0", result_backend="redis://:p4ss@redis:6379/1", rate_limit="10/m"
    )
    assert (settings.max_retries, settings.concurrency) == (3, 2)
    assert celery_settings({}).broker_url == "redis://localhost:6379/0"
    assert celery_settings({}).result_backend == "redis://localhost:6379/1"
    changed_rate = service_environment("celery-worker", **NEEDED, CELERY_TASK_RATE_LIMIT="none")
    assert celery_settings(changed_rate).rate_limit is None


@pytest.mark.parametrize(
    ("service", "name"),
    [
        ("api", "SHOAL_SERVE__TOKEN"), ("api", "SHOAL_FRONTIER"), ("redis", "REDIS_PASSWORD"),
        ("celery-worker", "REDIS_PASSWORD"), ("worker", "SHOAL_FRONTIER"), ("flower", "SHOAL_FLOWER_PASSWORD"),
    ],
)  # fmt: skip
def test_compose_starts_nothing_that_is_open(service: str, name: str) -> None:
    with pytest.raises(AssertionError, match=f"{name} has no value"):
        service_environment(service, **{key: value for key, value in NEEDED.items() if key != name})


def test_a_script_writes_all_that_compose_needs_once(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "secrets", tmp_path / "scripts")
    subprocess.run([script], check=True, capture_output=True)
    file = tmp_path / ".env"
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    made = dict(line.split("=", 1) for line in text.splitlines() if not line.startswith("#"))
    assert made.keys() == NEEDED.keys()
    assert made["SHOAL_FRONTIER"] == f"redis://:{made['REDIS_PASSWORD']}@redis:6379/2"
    assert all(re.fullmatch("[0-9a-f]{32,}", value) for name, value in made.items() if name != "SHOAL_FRONTIER")
    assert load_config(environ=service_environment("api", **made)).config.serve.token == made["SHOAL_SERVE__TOKEN"]
    assert "nothing was changed" in subprocess.run([script], check=True, capture_output=True, text=True).stdout
    assert file.read_text() == text
    assert "scripts/secrets" in DOCUMENT


def test_compose_up_needs_no_file_name() -> None:
    assert (ROOT / "compose.yml").samefile(COMPOSE_FILE)  # an override, such as the one for a browser, works with both
    assert SERVICES.keys() >= {"redis", "celery-worker", "worker", "flower", "api"}


def test_the_api_of_compose_needs_its_token() -> None:
    environ = service_environment("api", **NEEDED)
    check_binding(load_config(environ=environ).config.serve)
    del environ["SHOAL_SERVE__TOKEN"]
    with pytest.raises(ConfigError, match="token"):
        check_binding(load_config(environ=environ).config.serve)


def test_flower_asks_for_a_password() -> None:
    environ = service_environment("flower", **NEEDED)
    assert environ["FLOWER_BASIC_AUTH"] == "shoal:fl0wer"
    assert environ["FLOWER_UNAUTHENTICATED_API"] == "false"
    (container,) = containers(WORKLOADS["flower"])
    pod = {each["name"]: each for each in container["env"]}
    assert pod["FLOWER_BASIC_AUTH"]["valueFrom"] == {"secretKeyRef": {"name": "shoal", "key": "flower-auth"}}
    assert pod["FLOWER_UNAUTHENTICATED_API"]["value"] == "false"


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_redis_asks_for_a_password_that_ps_does_not_show(where: str, tmp_path: Path) -> None:
    """Its command as it is deployed, on a port and in a folder of its own."""
    if where == "compose":
        words = [word.replace("$$", "$") for word in SERVICES["redis"]["command"]]
        environ = service_environment("redis", **NEEDED)
    else:
        words, environ = containers(WORKLOADS["redis"])[0]["command"], {"REDIS_PASSWORD": "p4ss"}
    script = re.sub("--dir /data", "", words[-1])
    assert "p4ss" not in script
    assert "--appendonly yes" in script
    port = free_port()
    words = [*words[:-1], script.replace("redis-server ", f"redis-server --port {port} --dir {tmp_path} ", 1)]
    with subprocess.Popen(words, env={**os.environ, **environ}, stdout=subprocess.DEVNULL) as process:
        try:
            stranger = redis.Redis(port=port, retry=Retry(ConstantBackoff(0.05), 200))
            with pytest.raises(redis.AuthenticationError):
                stranger.ping()
            stranger.close()
            assert redis.Redis(port=port, password="p4ss").ping()
            assert b"p4ss" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        finally:
            process.terminate()


def test_services_are_looked_after_and_reached_from_this_machine_only() -> None:
    assert {"redis", "celery-worker", "worker", "flower", "api"} <= SERVICES.keys()
    for name, service in SERVICES.items():
        assert service["healthcheck"]["test"], name
        assert service["restart"] == ("on-failure" if name == "worker" else "unless-stopped"), name
        assert service["stop_grace_period"], name
        assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}, name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        volumes = [volume for volume in service.get("volumes", ()) if not volume.endswith(":ro")]
        assert {volume.partition(":")[0] for volume in volumes} <= COMPOSE["volumes"].keys()
        for other, wanted in service.get("depends_on", {}).items():
            assert wanted == {"condition": "service_healthy"}
            assert "healthcheck" in SERVICES[other]
    published = {name: interpolated(port) for name, each in SERVICES.items() for port in each.get("ports", ())}
    assert published == {
        "redis": "127.0.0.1:6379:6379", "api": "127.0.0.1:8000:8000", "flower": "127.0.0.1:5555:5555",
    }  # fmt: skip
    assert SERVICES["postgres"]["profiles"] == ["postgres"]


def test_services_are_confined() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"] is True, name
        assert "/tmp" in service["tmpfs"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["image"] == IMAGE or service["user"] == "999:999", name  # our image has a user of its own


def test_workers_of_a_fleet_start_on_request_and_know_their_run() -> None:
    service = SERVICES["worker"]
    assert service["deploy"]["replicas"] == WORKLOADS["shoal-worker"]["spec"]["replicas"] == 0
    assert inspect.signature(compose_pool).parameters["service"].default == "worker"  # what `shoal autoscale` scales
    words = [interpolated(word, WORKER_SPIDER="books.py", WORKER_RUN_ID="monday") for word in service["command"]]
    assert words[:4] == ["worker", "books.py", "--run-id", "monday"]
    assert service["working_dir"] == "/spiders"
    assert [interpolated(volume) for volume in service["volumes"]] == ["./spiders:/spiders:ro"]
    config = load_config(environ=service_environment("worker", **NEEDED)).config
    assert config == Config().with_settings({"frontier": "redis://:p4ss@redis:6379/2", "worker.metrics_token": ""})

    (container,) = containers(WORKLOADS["shoal-worker"])
    assert container["workingDir"] == "/spiders"
    named = {each["name"]: each["valueFrom"]["configMapKeyRef"]["key"] for each in container["env"][2:-1]}
    assert named == {"WORKER_SPIDER": "spider", "WORKER_RUN_ID": "run-id"}
    assert container["args"][:4] == ["worker", "$(WORKER_SPIDER)", "--run-id", "$(WORKER_RUN_ID)"]
    assert "--keep-alive" in container["args"]  # else Kubernetes restarts it again and again
    wanted = set(re.findall(r"(?:configMapKeyRef|configMap): \{name: ([\w-]+)", KUBERNETES_FILE.read_text()))
    assert wanted == set(re.findall(r"create configmap ([\w-]+)", DOCUMENT)) == {"shoal-run", "shoal-spiders"}


def test_metrics_of_workers_need_a_token_or_are_not_reachable() -> None:
    """In Compose only the health check inside the container reaches them. Kubelets come from outside."""
    words = [interpolated(word) for word in SERVICES["worker"]["command"]]
    assert words[words.index("--metrics-port") + 1] == "127.0.0.1:9100"
    token = {"SHOAL_WORKER__METRICS_TOKEN": "the-token-of-a-scrape"}
    config = load_config(environ=service_environment("worker", **NEEDED, **token)).config
    assert config.worker.metrics_token == "the-token-of-a-scrape"
    (container,) = containers(WORKLOADS["shoal-worker"])
    (variable,) = [each for each in container["env"] if each["name"] in token]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "shoal", "key": "metrics-token"}}
    assert container["readinessProbe"]["httpGet"]["path"] == container["livenessProbe"]["httpGet"]["path"] == "/health"
    listening = [words for words in shoal_commands() if "--metrics-port" in words]
    assert len(listening) == 2


def test_images_can_be_pinned_by_digest() -> None:
    """The document names every image that is not ours, and how to replace it."""
    pinned = {name: f"{name.lower()}@sha256:{'0' * 64}" for name in ("REDIS_IMAGE", "POSTGRES_IMAGE", "PYTHON_IMAGE")}
    values = [service["image"] for service in SERVICES.values()]
    values += [service["build"]["args"]["PYTHON_IMAGE"] for service in SERVICES.values() if "build" in service]
    assert {interpolated(value, **pinned) for value in values} == {IMAGE, *pinned.values()}
    (looked_up,) = re.findall(r"^for image in (.*); do$", DOCUMENT, re.MULTILINE)
    assert set(looked_up.split()) == {interpolated(value) for value in values} - {IMAGE}
    assert all(name in DOCUMENT for name in pinned)


def test_the_document_names_files_and_services_that_there_are() -> None:
    commands = re.findall(r"docker compose -f (\S+)([^`\n]*)", DOCUMENT)
    assert {file for file, _ in commands} == {COMPOSE_FILE.name}
    rest = " ".join(words for _, words in commands)
    scaled = set(re.findall(r"--scale ([\w-]+)=", DOCUMENT))
    assert scaled == {"celery-worker", "worker"}
    assert set(re.findall(r"(?:up -d|logs|--wait|run --rm|run --rm -T) ([a-z][\w-]*)", rest)) <= SERVICES.keys()
    rows = re.findall(r"^\| `([\w-]+)` \| .* \|", DOCUMENT[DOCUMENT.index("| service |") :], re.MULTILINE)
    assert set(rows) == SERVICES.keys()
    assert set(re.findall(r"deployment/([\w-]+)", DOCUMENT)) <= WORKLOADS.keys()


# -- Kubernetes


def test_there_is_all_that_it_takes_and_no_secret() -> None:
    kinds = {(each["kind"], each["metadata"]["name"]) for each in OBJECTS}
    assert kinds == {
        ("Namespace", "shoal"), ("ConfigMap", "shoal"), ("NetworkPolicy", "redis"),
        ("StatefulSet", "redis"), ("Service", "redis"),
        ("Deployment", "shoal-api"), ("Service", "shoal-api"),
        ("Deployment", "shoal-celery-worker"), ("Deployment", "shoal-worker"),
        ("Deployment", "flower"), ("Service", "flower"),
    }  # fmt: skip
    assert all(each["metadata"].get("namespace") == "shoal" for each in OBJECTS if each["kind"] != "Namespace")
    wanted = set(re.findall(r"secretKeyRef: \{name: shoal, key: ([\w-]+)\}", KUBERNETES_FILE.read_text()))
    (made,) = re.findall(r"create secret generic shoal((?: .*\\\n)* .*\n)", DOCUMENT)
    assert wanted == set(re.findall(r"--from-literal=([\w-]+)=", made))
    assert WORKLOADS["redis"]["spec"]["volumeClaimTemplates"][0]["metadata"]["name"] == "data"


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_confined_bounded_and_probed(name: str) -> None:
    spec = WORKLOADS[name]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"] == {"app": name}
    pod = spec["template"]["spec"]
    assert pod["enableServiceLinks"] is False  # else SHOAL_API_PORT is set, an unknown setting, and FLOWER_PORT, a URL
    assert pod["terminationGracePeriodSeconds"] >= 10
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == (10001 if name in OURS else 999)
    (container,) = pod["containers"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["resources"].keys() == {"requests", "limits"}
    assert container["readinessProbe"]
    assert container["livenessProbe"]
    volumes = {volume["name"] for volume in pod.get("volumes", ())}
    volumes |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_probes_of_the_api_ask_for_what_it_has() -> None:
    (container,) = containers(WORKLOADS["shoal-api"])
    paths = {kind: container[kind]["httpGet"]["path"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/health", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert set(paths.values()) <= create_app(Config()).openapi()["paths"].keys()


def test_services_lead_to_pods_and_pods_to_services() -> None:
    services = {each["metadata"]["name"]: each["spec"] for each in OBJECTS if each["kind"] == "Service"}
    for service in services.values():
        (container,) = containers(WORKLOADS[service["selector"]["app"]])
        (port,) = service["ports"]
        assert port["port"] in {each["containerPort"] for each in container["ports"]}
    policy = next(each["spec"] for each in OBJECTS if each["kind"] == "NetworkPolicy")
    (expression,) = policy["ingress"][0]["from"][0]["podSelector"]["matchExpressions"]
    assert set(expression["values"]) == OURS
    for name in OURS:
        urls = [each["value"] for each in containers(WORKLOADS[name])[0]["env"] if "://" in each.get("value", "")]
        assert urls
        assert all(re.fullmatch(r"redis://:\$\(REDIS_PASSWORD\)@redis:6379/[0-2]", url) for url in urls)


@pytest.mark.parametrize("name", sorted(OURS))
def test_the_settings_of_a_pod_can_be_read(name: str) -> None:
    (config_map,) = [each["data"] for each in OBJECTS if each["kind"] == "ConfigMap"]
    environ = dict(config_map)
    for each in containers(WORKLOADS[name])[0]["env"]:
        environ[each["name"]] = each.get("value", "a-secret-that-is-long").replace("$(REDIS_PASSWORD)", "p4ss")
    config = load_config(environ=environ).config
    settings = celery_settings(environ)
    assert settings.broker_url == ("redis://:p4ss@redis:6379/0" if name in CELERY else CelerySettings().broker_url)
    assert (settings.rate_limit, settings.concurrency, settings.max_retries) == ("10/m", 2, 3)
    assert config.download_delay == Config().download_delay
    if name != "flower":
        assert config.frontier == "redis://:p4ss@redis:6379/2"
    if name == "shoal-api":
        check_binding(config.serve)
