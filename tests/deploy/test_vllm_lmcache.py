"""What `deploy/vllm-lmcache` holds: well-formed, agreeing with itself, and understood by the gateway as it stands."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import load_config
from gateway.upstreams import kubernetes

HERE = Path(__file__).parents[2] / "deploy" / "vllm-lmcache"
SECRETS: dict[str, str] = dict.fromkeys(("WARMGATE_ADMIN_KEY", "WARMGATE_SECRET", "TEAM_A_KEY"), "a" * 40)
COMPOSE = yaml.safe_load((HERE / "compose.yaml").read_text())["services"]
VALUES = yaml.safe_load((HERE / "chart" / "values.yaml").read_text())
ENGINES = {"compose": COMPOSE["vllm-a"]["command"], "chart": VALUES["engine"]["args"]}
LMCACHES = {"compose": COMPOSE["lmcache"]["command"], "chart": VALUES["lmcache"]["args"]}


def gateway_file(where: str, folder: Path) -> Path:
    """The gateway's configuration there, as a file."""
    if where == "compose":
        return HERE / "warmgate.yaml"
    path = folder / "warmgate.yaml"
    path.write_text(yaml.safe_dump(VALUES["warmgate"]["config"]))
    return path


def flags(command: list[str]) -> dict[str, str]:
    """Flags and their values."""
    split = [word.removeprefix("--").partition("=") for word in command if word.startswith("--")]
    return {name: value for name, _, value in split}


def rendered() -> Iterator[dict[str, Any]]:
    """The chart's objects, by the few forms of Helm's templates that it uses: values, `toYaml`, and one `range`."""
    for file in sorted((HERE / "chart" / "templates").glob("*.yaml")):
        text = file.read_text()
        loop = re.fullmatch(r"\{\{- range \.Values\.pools \}\}\n(.*)\{\{- end \}\}\n", text, re.DOTALL)
        pages = [_filled(loop[1], pool) for pool in VALUES["pools"]] if loop else [_filled(text, {})]
        for page in pages:
            yield from filter(None, yaml.safe_load_all(page))


def _filled(text: str, item: dict[str, Any]) -> str:
    def value(path: str) -> Any:
        found: Any = {"Values": VALUES} if "Values" in path else item
        for name in path.removeprefix("$").strip(".").split("."):
            found = found[name]
        return found

    def put(match: re.Match[str]) -> str:
        path, indent = match["path"], match["indent"]
        if indent:
            lines = yaml.safe_dump(value(path), width=10_000).splitlines()
            return "".join(f"\n{' ' * int(indent)}{line}" for line in lines)
        return hashlib.sha256(str(value(path)).encode()).hexdigest() if match["sum"] else str(value(path))

    pipe = r"(?: \| (?:nindent (?P<indent>\d+)|(?P<sum>sha256sum)))?"
    filled = re.sub(r"(?:\s*\{\{-|\{\{) (?:toYaml )?(?P<path>[$.\w]+)" + pipe + r" \}\}", put, text)
    assert "{{" not in filled, "a form that this does not know"
    return filled


@pytest.mark.parametrize("where", ["compose", "chart"])
def test_the_gateway_understands_its_configuration(where: str, tmp_path: Path) -> None:
    config = load_config(gateway_file(where, tmp_path), SECRETS, {})
    assert config.engine is None
    for upstream in config.upstreams:
        assert upstream.cache_salt and upstream.tokenizer == Path("/models/model")
        assert flags(ENGINES[where])["model"] == "/models/model"


@pytest.mark.parametrize("where", ["compose", "chart"])
def test_events_are_read_where_vllm_tells_them(where: str, tmp_path: Path) -> None:
    told = json.loads(flags(ENGINES[where])["kv-events-config"])
    assert told["enable_kv_cache_events"] and told["publisher"] == "zmq"
    for upstream in load_config(gateway_file(where, tmp_path), SECRETS, {}).upstreams:
        host = "{host}" if upstream.kubernetes else upstream.name
        assert upstream.kv_events is not None
        for ours, theirs in ((upstream.kv_events.connect, "endpoint"), (upstream.kv_events.replay, "replay_endpoint")):
            assert told[theirs].replace("*", host) == ours, "vLLM binds where there is a wildcard"


@pytest.mark.parametrize("where", ["compose", "chart"])
def test_vllm_finds_lmcache_and_lmcache_finds_redis(where: str) -> None:
    moved = json.loads(flags(ENGINES[where])["kv-transfer-config"])
    assert moved["kv_load_failure_policy"] == "recompute", "a failure costs speed, never an answer"
    parts = moved["kv_connector_extra_config"].get("connectors", [moved])
    [sharing] = [part for part in parts if part["kv_connector"] == "LMCacheMPConnector"]
    server = flags(LMCACHES[where])
    assert sharing["kv_connector_extra_config"]["lmcache.mp.port"] == int(server["port"])
    below = json.loads(server["l2-adapter"])
    assert (below["type"], below["host"], below["port"]) == ("resp", "redis", 6379)


def test_compose_names_what_is_there() -> None:
    for name, service in COMPOSE.items():
        assert set(service.get("depends_on", ())) <= COMPOSE.keys(), name
    assert {one["name"] for one in yaml.safe_load((HERE / "warmgate.yaml").read_text())["upstreams"]} <= COMPOSE.keys()


def test_the_chart_makes_well_formed_objects_that_find_each_other() -> None:
    objects = {(one["kind"], one["metadata"]["name"]): one for one in rendered()}
    for (kind, name), one in objects.items():
        assert one["apiVersion"]
        if kind in ("Deployment", "DaemonSet"):
            spec = one["spec"]["template"]["spec"]
            assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
            mounted = {mount["name"] for each in spec["containers"] for mount in each.get("volumeMounts", ())}
            assert mounted == {volume["name"] for volume in spec.get("volumes", ())}, name
        if kind == "Service":
            assert (("Deployment", one["spec"]["selector"]["app"])) in objects
    for upstream in VALUES["warmgate"]["config"]["upstreams"]:
        assert ("Service", upstream["kubernetes"]["service"]) in objects
    inside = yaml.safe_load(objects["ConfigMap", "warmgate"]["data"]["warmgate.yaml"])
    assert inside == VALUES["warmgate"]["config"]
    engine = objects["Deployment", VALUES["pools"][0]["name"]]["spec"]["template"]["spec"]["containers"][0]
    assert engine["args"] == ENGINES["chart"]


def test_the_gateway_may_list_and_watch_endpoint_slices() -> None:
    objects = {one["kind"]: one for one in rendered() if one["metadata"]["name"] == "warmgate"}
    assert objects["Role"]["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]
    assert "/apis/discovery.k8s.io/v1/" in Path(kubernetes.__file__).read_text()
    bound = objects["RoleBinding"]
    assert bound["roleRef"]["name"] == objects["Role"]["metadata"]["name"]
    assert [one["name"] for one in bound["subjects"]] == [objects["ServiceAccount"]["metadata"]["name"]]
    assert objects["Deployment"]["spec"]["template"]["spec"]["serviceAccountName"] == "warmgate"
