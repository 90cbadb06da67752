"""The image and what runs beside it: flags, ports, paths and names agree with what they name."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from server_process import ServerProcess

import stemma
from stemma.cli.serve import add_parser
from stemma.flags import Parser
from stemma.server.settings import KEY_VARIABLE, ServerSettings, server_settings

ROOT = Path(stemma.__file__).parent
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
KEY = "a-key-that-nobody-guesses"


def _instructions() -> dict[str, list[str]]:
    """What the Dockerfile says, by instruction."""
    lines = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text()).splitlines()
    found: dict[str, list[str]] = {}
    for line in lines:
        name, _, rest = line.partition(" ")
        if name and not name.startswith("#"):
            found.setdefault(name, []).append(rest)
    return found


def _entrypoint() -> list[str]:
    (line,) = _instructions()["ENTRYPOINT"]
    command: list[str] = json.loads(line)
    return command


def _health_check() -> list[str]:
    (line,) = _instructions()["HEALTHCHECK"]
    command: list[str] = json.loads(line.partition(" CMD ")[2])
    return command


def _yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def _settings(flags: list[str]) -> ServerSettings:
    """What the container's command comes to; exits where a flag is not one of `stemma serve`."""
    program, command, *given = [*_entrypoint(), *flags]
    assert (program, command) == ("stemma", "serve")
    parser = Parser()
    add_parser(parser.add_subparsers())
    return server_settings(parser.parse_args([command, *given]))


def _scrape() -> Any:
    (job,) = _yaml("prometheus.yaml")["scrape_configs"]
    return job


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_the_command_is_one_and_is_given_the_time_that_it_asks_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = _yaml("compose.yaml")["services"]["stemma"]
    assert list(server["environment"]) == [KEY_VARIABLE]
    monkeypatch.setenv(KEY_VARIABLE, KEY)  # without one it listens to nobody outside
    settings = _settings(_yaml(name)["services"]["stemma"]["command"])
    assert int(server["stop_grace_period"].removesuffix("s")) > settings.drain_s


def test_all_name_the_port_that_it_listens_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    port = _settings([]).port
    assert _instructions()["EXPOSE"] == [str(port)]
    (published,) = _yaml("compose.yaml")["services"]["stemma"]["ports"]
    assert published.endswith(f":{port}") and published.startswith("127.0.0.1:")
    assert _scrape()["static_configs"] == [{"targets": [f"stemma:{port}"]}]
    assert f"http://127.0.0.1:{port}/" in _health_check()[-1]


def test_files_volumes_services_and_secrets_exist() -> None:
    compose = _yaml("compose.yaml")
    services = compose["services"]
    mounts = [volume.split(":") for each in services.values() for volume in each["volumes"]]
    for source, *_ in (mount for mount in mounts if not mount[0].startswith("${")):
        is_here = source.startswith(".") and (DEPLOY / source).is_file()
        assert is_here or source in compose["volumes"], source
    assert (DEPLOY / services["stemma"]["build"]["context"] / "Dockerfile").is_file()
    (secret,) = services["prometheus"]["secrets"]
    assert _scrape()["authorization"] == {"credentials_file": f"/run/secrets/{secret}"}
    assert compose["secrets"][secret] == {"environment": KEY_VARIABLE}
    (source,) = _yaml("grafana/datasources.yaml")["datasources"]
    assert re.fullmatch(r"http://(\w+):9090", source["url"])[1] in services  # type: ignore[index]
    (provider,) = _yaml("grafana/dashboards.yaml")["providers"]
    dashboards = {str(Path(target).parent) for source, target, *_ in mounts if "docs/" in source}
    assert dashboards == {provider["options"]["path"]}
    image = _instructions()
    (volumes,) = (json.loads(line) for line in image["VOLUME"])
    mounted = [volume.split(":")[-2:] for volume in services["stemma"]["volumes"]]
    assert {path for mount in mounted for path in mount if path in volumes} == set(volumes)


def test_the_image_has_a_python_and_a_torch_that_the_package_takes() -> None:
    image = _instructions()
    versions = {line.partition("=")[2] for line in image["ARG"] if line.startswith("PYTHON=")}
    known = [name.rpartition(" ")[2] for name in PROJECT["project"]["classifiers"]]
    assert versions and versions <= set(known)
    torch = next(name for name in PROJECT["project"]["dependencies"] if name.startswith("torch"))
    assert any(f'"{torch}"' in line for line in image["RUN"])
    assert image["USER"] == ["stemma"], "not root"
    (arguments,) = [_yaml("compose.gpu.yaml")["services"]["stemma"]["build"]["args"]]
    assert set(arguments) <= {line.partition("=")[0] for line in image["ARG"]}
    assert arguments["EXTRAS"].strip("[]") in PROJECT["project"]["optional-dependencies"]


def test_nothing_that_the_wheel_is_made_of_is_left_out_of_the_build() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    ignored = [line for line in lines if line and not line.startswith(("#", "**/"))]
    needed = {name.split(".")[1] for name in PROJECT["tool"]["setuptools"]["packages"][1:]}
    needed |= {path.name for path in ROOT.glob("*.py")}
    needed |= {"pyproject.toml", PROJECT["project"]["readme"], "py.typed", "LICENSE"}
    hidden = [n for n in needed for pattern in ignored if fnmatch.fnmatch(n, pattern)]
    assert hidden == []


def test_its_server_is_found_healthy_and_scraped_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry point's own command, at an address of the test's."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    flags = [*_entrypoint()[2:], *_yaml("compose.yaml")["services"]["stemma"]["command"]]
    at = {"--host": "127.0.0.1", "--port": "0"}
    for flag, value in at.items():
        flags[flags.index(flag) + 1] = value
    with ServerProcess(tmp_path, *flags) as server:
        interpreter, *code = _health_check()
        assert interpreter == "python"
        asked = [re.sub(r"http://127.0.0.1:\d+", server.url, word) for word in code]
        subprocess.run([sys.executable, *asked], check=True, timeout=240)
        metrics = server.url + _scrape()["metrics_path"]
        assert httpx.get(metrics).status_code == 401
        scraped = httpx.get(metrics, headers={"Authorization": f"Bearer {KEY}"})
        assert scraped.status_code == 200 and "stemma_engine_up 1" in scraped.text
