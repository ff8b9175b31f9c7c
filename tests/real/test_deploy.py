"""`deploy/vllm-lmcache` speaks to the versions that are installed here: they know every flag that it gives."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from tests.real.processes import PYTHON, ROOT

HERE = ROOT / "deploy" / "vllm-lmcache"
VLLM = (str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--help=all")
LMCACHE = (str(PYTHON.with_name("lmcache")), "server", "--help")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [VLLM, LMCACHE], ids=["vllm", "lmcache"])
def test_every_flag_is_known(command: tuple[str, ...]) -> None:
    compose = yaml.safe_load((HERE / "compose.yaml").read_text())["services"]
    chart = yaml.safe_load((HERE / "chart" / "values.yaml").read_text())
    ours = (compose["vllm-a"]["command"], chart["engine"]["args"])
    if command is LMCACHE:
        ours = (compose["lmcache"]["command"], chart["lmcache"]["args"])
    given = {word.partition("=")[0] for words in ours for word in words}
    assert len(given) >= 7
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    known = {word.strip(",[]=") for word in told.split() if word.lstrip("[").startswith("--")}
    assert given <= known, given - known
