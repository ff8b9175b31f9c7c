"""The command line: what it can be asked for, and one sentence for whatever is wrong."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway import cli
from gateway.remote import ask

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def warmgate(monkeypatch, capsys, tmp_path: Path) -> Run:
    """Runs the command in an empty folder; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["warmgate", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


class TestHelp:
    def test_names_every_command(self, warmgate: Run):
        code, out, _ = warmgate("--help")
        assert code == 0
        for word in ("serve", "engine", "check", "doctor", "purge", "version", "warmgate.yaml"):
            assert word in out

    def test_serve_has_the_flags_of_the_contract(self, warmgate: Run):
        _, out, _ = warmgate("serve", "--help")
        for flag in ("--config", "--host", "--port", "--workers", "--no-engine"):
            assert flag in out

    def test_version(self, warmgate: Run):
        code, out, _ = warmgate("version")
        assert out.startswith("warmgate ")
        assert warmgate("--version") == (code, out, "")

    @pytest.mark.parametrize("words", [["srve"], ["serve", "--prot", "1"], ["serve", "--port", "x"]])
    def test_a_mistyped_command_is_told_without_a_traceback(self, warmgate: Run, words: list[str]):
        code, out, err = warmgate(*words)
        assert code == 2
        assert "Traceback" not in out + err


class TestCheck:
    def test_says_what_would_run(self, warmgate: Run, tmp_path: Path):
        (tmp_path / "warmgate.yaml").write_text(
            "listen: {port: 9}\nengine: off\nupstreams: [{name: a, url: 'http://h'}]"
        )
        code, out, _ = warmgate("check")
        assert code == 0
        assert "http://127.0.0.1:9" in out
        assert "a: http://h" in out
        assert "The configuration is good." in out

    def test_tells_every_fault_in_a_sentence(self, warmgate: Run, tmp_path: Path):
        (tmp_path / "w.yaml").write_text("cache: {memroy: {}}\nport: 1")
        code, _, err = warmgate("check", "--config", "w.yaml")
        assert (code, err.splitlines()) == (
            2,
            [
                "warmgate: unknown key 'cache.memroy'; did you mean 'cache.memory'?",
                "warmgate: unknown key 'port'; did you mean 'listen.port'?",
            ],
        )

    def test_a_file_that_is_not_there(self, warmgate: Run):
        code, _, err = warmgate("check", "--config", "none.yaml")
        assert code == 2
        assert "none.yaml does not exist" in err

    def test_finds_missing_secrets_and_colliding_answers(self, warmgate: Run, tmp_path: Path):
        (tmp_path / "warmgate.yaml").write_text("faq: {path: faq.yaml}\nadmin: {key: env:NOT_SET_AT_ALL}")
        (tmp_path / "faq.yaml").write_text("- {ask: ['Why?'], answer: a}\n- {ask: ['why'], answer: b}\n")
        code, _, err = warmgate("check")
        assert code == 2
        assert "admin.key: the environment variable NOT_SET_AT_ALL is not set" in err
        assert "faq.path: two entries answer 'why'" in err

    def test_a_tokenizer_that_is_not_there(self, warmgate: Run, tmp_path: Path):
        upstreams = "upstreams: [{name: a, url: 'http://h', tokenizer: t}, {name: b, url: 'http://h', tokenizer: none}]"
        (tmp_path / "warmgate.yaml").write_text(f"engine: off\n{upstreams}")
        (tmp_path / "t").mkdir()
        code, _, err = warmgate("check")
        assert (code, err.splitlines()) == (
            2,
            [
                f"warmgate: upstreams[1].tokenizer: there is no file or folder {tmp_path / 'none'}; without it the "
                "gateway runs, but cannot tell what this upstream holds"
            ],
        )


class TestServe:
    def test_a_port_in_use_is_one_sentence(self, warmgate: Run):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            code, _, err = warmgate("serve", "--no-engine", "--port", str(port))
        assert code == 2
        assert err.startswith(f"warmgate: port {port} on 127.0.0.1 is already in use; ")

    def test_open_to_the_network_is_refused(self, warmgate: Run):
        code, _, err = warmgate("serve", "--host", "0.0.0.0")
        assert code == 2
        assert "would open the gateway to the network without keys" in err

    def test_without_the_engine_extra_it_says_how_to_get_it(self, warmgate: Run, monkeypatch):
        monkeypatch.setattr("gateway.supervisor.supervise.find_spec", lambda name: None)
        for words in (["serve", "--port", "0"], ["engine"]):
            code, _, err = warmgate(*words)
            assert code == 2
            assert "pip install 'warmgate[engine]'" in err

    def test_a_missing_model_file_is_the_engines_sentence_alone(self, tmp_path: Path):
        (tmp_path / "warmgate.yaml").write_text("listen: {port: 0}\nengine: {model: none.gguf}\nledger: off\n")
        ended = subprocess.run(
            [sys.executable, "-m", "gateway.cli", "serve"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1]), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 2
        assert "none.gguf" in ended.stderr
        assert "Traceback" not in ended.stderr

    def test_the_real_gateway_starts_reloads_and_ends(self, tmp_path: Path):
        (tmp_path / "warmgate.yaml").write_text("engine: off\nledger: off\ncache: {disk: off}\nlisten: {port: 0}")
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "serve", "--workers", "2"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1]), "HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            told = line = ""
            assert process.stdout
            for line in process.stdout:
                told += line
                if "Dashboard" in line:
                    break
            assert "only remembered and curated answers can be given" in told
            url = line.split("Dashboard: ")[1].strip().removesuffix("/dashboard")
            assert ask(url + "/admin/reload", None, {}) == {"reloaded": True, "at_next_start": []}
            for line in process.stdout:
                told += line
                if "reloaded" in line:
                    break
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=30)
            assert process.returncode == 0
            assert "Traceback" not in told + rest
        finally:
            process.kill()
            process.wait()

    def test_no_process_outlives_a_killed_supervisor(self, tmp_path: Path):
        (tmp_path / "warmgate.yaml").write_text(
            "engine: off\nledger: off\ncache: {disk: off}\nlisten: {port: 0, workers: 2}"
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "serve"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        assert any("Dashboard" in line for line in process.stdout)
        workers = psutil.Process(process.pid).children()
        process.kill()
        process.communicate()
        gone, alive = psutil.wait_procs(workers, timeout=20)
        assert (len(gone), alive) == (2, [])

    def test_a_folder_named_like_one_of_our_packages_does_no_harm(self, tmp_path: Path):
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "__init__.py").write_text("raise SystemExit('the wrong cache')")
        (tmp_path / "warmgate.yaml").write_text("engine: off\nledger: off\ncache: {disk: off}\nlisten: {port: 0}")
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gateway.cli", "serve"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout
            assert any("Dashboard" in line for line in process.stdout)
        finally:
            process.terminate()
            process.communicate(timeout=30)


class Admin(BaseHTTPRequestHandler):
    seen: list[tuple[str, str | None, Any]]
    status = 200

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append((self.path, self.headers["authorization"], body))
        answer = {"purged": True} if self.status == 200 else {"detail": "The admin key is wrong."}
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def admin(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[tuple[str, str | None, Any]]]]:
    handler = type("Handler", (Admin,), {"seen": [], "status": getattr(request, "param", 200)})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.seen  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


class TestPurge:
    def test_asks_the_running_gateway(self, warmgate: Run, admin):
        url, seen = admin
        code, out, _ = warmgate("purge", "--tag", "news", "--soft", "--url", url + "/", "--admin-key", "k")
        assert (code, json.loads(out)) == (0, {"purged": True})
        assert seen == [("/admin/purge", "Bearer k", {"tag": "news", "soft": True})]

    def test_the_admin_key_comes_from_the_environment(self, warmgate: Run, admin, monkeypatch):
        url, seen = admin
        monkeypatch.setenv("WARMGATE_ADMIN_KEY", "from-env")
        warmgate("purge", "--model", "m1", "--url", url)
        assert seen == [("/admin/purge", "Bearer from-env", {"model": "m1", "soft": False})]

    def test_an_age_counts_back_from_now(self, warmgate: Run, admin):
        url, seen = admin
        warmgate("purge", "--before", "1h", "--url", url)
        assert seen[0][2]["before"] == pytest.approx(time.time() - 3600, abs=5)

    def test_without_an_address_it_asks_where_the_configuration_listens(
        self, warmgate: Run, admin, tmp_path: Path, monkeypatch
    ):
        url, seen = admin
        monkeypatch.setenv("WARMGATE_ADMIN_KEY", "k")  # which is no setting
        (tmp_path / "warmgate.yaml").write_text(f"listen: {{port: {url.rpartition(':')[2]}}}\n")
        assert warmgate("purge", "--tag", "news")[0] == 0
        assert seen == [("/admin/purge", "Bearer k", {"tag": "news", "soft": False})]
        (tmp_path / "other.yaml").write_text("listen: {port: 0}\n")
        code, _, err = warmgate("purge", "--tag", "news", "--config", "other.yaml")
        assert (code, "name the gateway with --url" in err) == (2, True)

    @pytest.mark.parametrize("admin", [403], indirect=True)
    def test_a_refusal_is_passed_on(self, warmgate: Run, admin):
        code, _, err = warmgate("purge", "--tag", "a", "--url", admin[0])
        assert (code, err) == (2, "warmgate: the gateway refused: The admin key is wrong.\n")

    @pytest.mark.parametrize(
        ("words", "order"),
        [
            (["--all"], {"all": True}),
            (["--namespace", "n", "--tenant", "t"], {"namespace": "n", "tenant": "t"}),
            (["--key", "ab12"], {"key": "ab12"}),
        ],
    )
    def test_names_what_to_forget(self, warmgate: Run, admin, words: list[str], order: dict[str, Any]):
        url, seen = admin
        assert warmgate("purge", *words, "--url", url)[0] == 0
        assert seen[0][2] == {**order, "soft": False}

    @pytest.mark.parametrize("words", [[], ["--tag", "a", "--model", "b"], ["--before", "yesterday"]])
    def test_needs_to_know_what_to_forget(self, warmgate: Run, words: list[str]):
        code, _, err = warmgate("purge", *words)
        assert code == 2
        assert "--before" in err

    @pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense"])
    def test_no_gateway_there(self, warmgate: Run, url: str):
        code, _, err = warmgate("purge", "--tag", "a", "--url", url)
        assert code == 2
        assert url in err
