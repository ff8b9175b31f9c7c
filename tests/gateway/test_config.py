"""The configuration: what may be written, what comes of it, and what is said when it is wrong."""

import hashlib
import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from gateway.config import Config, ConfigError, SecretError, load_config, secrets_of, unreadable_secrets
from gateway.config.units import SIZE_UNITS, TIME_UNITS, parse_size, parse_time

CONTRACT = """
listen: {host: 127.0.0.1, port: 8080, workers: 1}
admin: {key: env:WARMGATE_ADMIN_KEY}
upstreams:
  - name: engine-a
    url: http://127.0.0.1:9001/
    api: openai
    api_key: env:OPENAI_API_KEY
    models: [m1, m2]
    role: both
    kv_events: {bind: "tcp://127.0.0.1:5557", replay: "tcp://127.0.0.1:5558", block_size: 32}
    tokenizer: /models/m1
    timeouts: {connect: 5s, first_byte: 10m, idle: 5m, total: 1h}
    labels: {hardware: h200, watts: 700, cost_per_hour: 3.5}
models:
  fast: {target: m1, revision: "2026-11-01", fallback: [m2], faq: true, slo: {ttft: 500ms, tpot: 40ms}}
tenants:
  - name: t1
    keys: [env:T1_KEY, {key: file:keys/t1, models: [m1]}]
    models: [m1, fast]
    limits: {requests_per_minute: 600, tokens_per_minute: 200000, concurrent: 64, usd_per_day: 20}
    cache: {sampled: faq, max_ttl: 1d}
cache:
  memory: {max_bytes: 256MiB, eviction: s3fifo}
  disk: {path: cache, max_bytes: 4GiB}
  redis: {url: "redis://127.0.0.1:6379/0", timeout: 50ms, prefix: "wg"}
  ttl: 1h
  max_ttl: 7d
  stale_while_revalidate: 10m
  stale_if_error: 1d
  max_entry: 1MiB
  sampled: never
  store_finish: [stop, tool_calls]
  rules:
    - match: {model: "m1", tenant: "*", path: /v1/embeddings}
      ttl: 30d
  holdout: 0.01
limits: {max_body: 16MiB}
secret: env:SALT
faq: {path: faq.yaml}
engine:
  model: smollm2-135m-instruct
  device: auto
  dtype: auto
  block_size: 32
  kv_cache: {device: auto, host: 2GiB, remote: "redis://127.0.0.1:6379/1"}
  speculate: auto
routing: {policy: prefix, max_load_ratio: 1.3}
disaggregation: {enabled: auto}
prices: prices.yaml
ledger: {path: ledger.db, keep: 30d, store_prompts: false}
telemetry: {otlp: "http://127.0.0.1:4318"}
"""


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str, env: dict[str, str] | None = None, **overrides: object) -> Config:
        path = tmp_path / "warmgate.yaml"
        path.write_text(text)
        return load_config(path, env or {}, overrides)

    return load


def faults(load, text: str, env: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text, env)
    return caught.value.messages


class TestContract:
    def test_every_key_of_the_contract_is_known_and_typed(self, load, tmp_path: Path):
        config = load(CONTRACT)
        assert config.upstreams[0].url == "http://127.0.0.1:9001"
        assert config.upstreams[0].timeouts.first_byte == 600.0
        assert config.models["fast"].slo.ttft == 0.5
        assert config.cache.memory and config.cache.memory.max_bytes == 256 << 20
        assert config.cache.redis and (config.cache.redis.timeout, config.cache.redis.address()) == (
            0.05,
            "redis://127.0.0.1:6379/0",
        )
        assert config.cache.rules[0].ttl == 30 * 86_400.0
        assert config.tenants[0].keys[1].models == ("m1",)
        assert config.engine and config.engine.kv_cache.host == 2 << 30

    def test_relative_paths_are_taken_from_the_files_folder(self, load, tmp_path: Path):
        config = load(CONTRACT)
        assert config.faq.path == tmp_path / "faq.yaml"
        assert config.cache.disk and config.cache.disk.path == tmp_path / "cache"
        assert str(config.tenants[0].keys[1].key) == f"file:{tmp_path}/keys/t1"

    def test_survives_the_way_to_a_worker(self, load):
        for config in (load(CONTRACT), load(""), load("engine: off\ncache: {memory: off, disk: off}\nledger: off")):
            assert Config.model_validate_json(config.model_dump_json()) == config

    def test_nothing_written_serves_the_small_model_on_loopback(self):
        config = load_config(None, {}, {})
        assert (config.listen.host, config.listen.port, config.listen.workers) == ("127.0.0.1", 8080, 1)
        assert config.open
        assert config.engine and config.engine.model == "smollm2-135m-instruct"
        assert config.cache.memory and config.cache.memory.max_bytes == 256 << 20
        assert config.cache.disk and config.cache.disk.path == Path.home() / ".cache" / "warmgate"
        assert config.cache.redis is None

    def test_the_embedded_engine_is_for_those_who_name_no_upstream(self, load):
        upstream = "upstreams: [{name: a, url: 'http://h'}]\n"
        assert load(upstream).engine is None
        assert load(upstream + "engine: {block_size: 16}").engine.block_size == 16
        assert load(upstream + "engine: on").engine is not None
        assert load("engine: off").engine is None

    def test_is_frozen(self):
        with pytest.raises(ValidationError):
            Config().listen.port = 1  # type: ignore[misc]

    def test_a_key_without_a_value_counts_as_not_written(self, load):
        assert load("cache:\nlisten:\n  port:\n") == load("")

    def test_an_alias_without_a_target_stands_for_itself(self, load):
        assert load("models: {m1: {revision: x}}").models["m1"].target == "m1"


class TestSources:
    def test_environment_over_file_and_flags_over_both(self, load):
        text = "listen: {port: 1, workers: 2, host: localhost}"
        config = load(text, {"WARMGATE_LISTEN__PORT": "3", "WARMGATE_LISTEN__WORKERS": "4"}, listen={"port": 5})
        assert (config.listen.port, config.listen.workers, config.listen.host) == (5, 4, "localhost")

    def test_flags_that_were_not_given_change_nothing(self, load):
        assert load("listen: {port: 1}", listen={"port": None}, engine=None).listen.port == 1

    def test_lists_and_mappings_in_the_environment(self, load):
        config = load("", {"WARMGATE_UPSTREAMS": '[{"name": "a", "url": "http://h"}]', "WARMGATE_CACHE__TTL": "5m"})
        assert config.upstreams[0].name == "a"
        assert config.cache.ttl == 300.0

    def test_off_in_the_environment(self, load):
        assert load("", {"WARMGATE_ENGINE": "off"}).engine is None

    def test_a_mistyped_variable_is_an_error_that_names_the_nearest(self, load):
        assert faults(load, "", {"WARMGATE_LISTEN_PORT": "80"}) == [
            "unknown setting WARMGATE_LISTEN_PORT in the environment; did you mean 'WARMGATE_LISTEN__PORT'?"
        ]
        assert faults(load, "", {"WARMGATE_LISTEN__PROT": "80"}) == [
            "unknown key 'listen.prot'; did you mean 'listen.port'?"
        ]

    def test_variables_that_hold_secrets_are_not_settings(self, load):
        env = {
            "WARMGATE_ADMIN_KEY": "hunter2",
            "WARMGATE_T1": "x",
            "WARMGATE_TENANTS": "[{name: a, keys: [env:WARMGATE_T1]}]",
        }
        assert load("admin: {key: env:WARMGATE_ADMIN_KEY}", env).tenants[0].name == "a"

    def test_what_kubernetes_sets_for_a_service_named_warmgate_is_not_a_setting(self, load):
        env = {
            "WARMGATE_PORT": "tcp://10.0.0.1:8080",
            "WARMGATE_SERVICE_HOST": "10.0.0.1",
            "WARMGATE_SERVICE_PORT_HTTP": "8080",
            "WARMGATE_PORT_8080_TCP_ADDR": "10.0.0.1",
            "WARMGATE_REDIS_PORT": "tcp://10.0.0.2:6379",
        }
        assert load("", env) == load("")


WRONG = [
    ("cache: {memroy: {}}", "unknown key 'cache.memroy'; did you mean 'cache.memory'?"),
    ("port: 1", "unknown key 'port'; did you mean 'listen.port'?"),
    ("zzzzzz: 1", "unknown key 'zzzzzz'"),
    (
        "upstreams: [{name: a, url: 'http://h', timeout: {}}]",
        "unknown key 'upstreams[0].timeout'; did you mean 'upstreams[0].timeouts'?",
    ),
    ("models: {fast: {targt: m}}", "unknown key 'models.fast.targt'; did you mean 'models.fast.target'?"),
    ("listen: {port: 99999}", "listen.port must be at most 65535, not 99999"),
    ("listen: {port: yes}", "listen.port must be a number, not True"),
    ("listen: {workers: 0}", "listen.workers must be at least 1, not 0"),
    ("listen: 8080", "listen must be a mapping (key: value), not 8080"),
    ("upstreams: {a: 1}", "upstreams must be a list"),
    ("upstreams: [{url: 'http://h'}]", "upstreams[0].name is missing"),
    (
        "upstreams: [{name: a, url: 'ftp://h'}]",
        "upstreams[0].url must be a URL that begins with http:// or https://, not 'ftp://h'",
    ),
    ("upstreams: [{name: a, url: 'http://h'}, {name: a, url: 'http://i'}]", "upstreams[1].name 'a' is used twice"),
    ("cache: {ttl: 5 minutes}", "cache.ttl must be a time such as 500ms, 30s, 10m, 1h or 7d, not '5 minutes'"),
    ("cache: {max_entry: big}", "cache.max_entry must be a size such as 512KiB, 256MiB or 4GiB, not 'big'"),
    ("cache: {sampled: mabye}", "cache.sampled must be 'never', 'faq' or 'always', not 'mabye'"),
    ("cache: {holdout: 2}", "cache.holdout must be at most 1, not 2"),
    ("models: {m: {revision: 2026-11-01}}", "models.m.revision must be text; put it in quotes"),
    ("models: {a: {target: m}, b: {target: a}}", "models.b points at 'a', which is itself an alias; name its target"),
    ("tenants: [{name: a}]", "tenants[0].keys is empty, so that nobody could use tenant 'a'"),
    ("engine: {device: tpu}", "engine.device must be auto, cpu, cuda or cuda:N, not 'tpu'"),
    (
        "listen: {host: 0.0.0.0}",
        "listen.host '0.0.0.0' would open the gateway to the network without keys; "
        "add tenants with keys, or listen on 127.0.0.1",
    ),
]  # fmt: skip


class TestFaults:
    @pytest.mark.parametrize(("text", "sentence"), WRONG)
    def test_one_sentence_names_the_key_and_what_it_must_be(self, load, text: str, sentence: str):
        assert faults(load, text) == [sentence]

    def test_all_faults_are_told_at_once(self, load):
        assert len(faults(load, "listen: {port: x, prot: 1}\ncache: {ttl: y}")) == 3

    def test_broken_yaml_names_the_line(self, load, tmp_path: Path):
        assert faults(load, "listen: {}\ncache: [")[0].startswith(f"{tmp_path}/warmgate.yaml, line 2: ")

    def test_a_key_given_twice_is_refused(self, load, tmp_path: Path):
        assert faults(load, "cache: {}\ncache: {}") == [
            f"{tmp_path}/warmgate.yaml, line 2: the key 'cache' is given twice"
        ]

    def test_a_missing_file(self, tmp_path: Path):
        with pytest.raises(ConfigError, match="does not exist"):
            load_config(tmp_path / "none.yaml", {}, {})

    def test_only_loopback_may_be_open(self, load):
        for host in ("127.0.0.1", "127.8.9.1", "localhost", "'::1'"):
            assert load(f"listen: {{host: {host}}}").open
        assert not load("listen: {host: 0.0.0.0}\ntenants: [{name: a, keys: [env:K]}]").open
        assert faults(load, "listen: {host: example.org}")


class TestSecrets:
    @pytest.mark.parametrize(
        "text",
        [
            "admin: {key: hunter2}",
            "tenants: [{name: a, keys: [hunter2]}]",
            "upstreams: [{name: a, url: 'http://h', api_key: hunter2}]",
            "upstreams: [{name: a, url: 'http://h', api_key: 'sha256:hunter2'}]",
            "upstreams: [{name: a, url: 'http://u:hunter2@h'}]",
            "cache: {redis: {url: 'redis://:hunter2@h/0'}}",
            "secret: hunter2",
        ],
    )
    def test_a_literal_is_refused_and_not_repeated(self, load, text: str):
        (sentence,) = faults(load, text)
        assert "hunter2" not in sentence
        assert "env:NAME" in sentence

    def test_are_read_when_needed(self, load, tmp_path: Path):
        (tmp_path / "k").write_text("two\n")
        config = load("tenants: [{name: a, keys: [env:K, file:k]}]")
        first, second = (item.key for item in config.tenants[0].keys)
        assert first.resolve({"K": "one"}) == "one"
        assert second.resolve({}) == "two"
        with pytest.raises(SecretError, match="the environment variable K is not set"):
            first.resolve({})

    def test_a_hashed_key_matches_the_key_alone(self, load):
        digest = hashlib.sha256(b"right").hexdigest()
        key = load(f"tenants: [{{name: a, keys: ['sha256:{digest}']}}]").tenants[0].keys[0].key
        assert key.matches("right")
        assert not key.matches("wrong")
        with pytest.raises(SecretError):
            key.resolve()

    def test_an_empty_secret_is_no_secret(self, load, tmp_path: Path):
        (tmp_path / "empty").write_text("\n")
        config = load("admin: {key: env:A}\nsecret: file:empty")
        assert unreadable_secrets(config, {"A": ""}) == [
            "admin.key: the environment variable A is empty",
            f"secret: the secret file {tmp_path}/empty is empty",
        ]

    def test_all_are_found_by_their_paths(self, load):
        assert [path for path, _ in secrets_of(load(CONTRACT))] == [
            "admin.key",
            "upstreams[0].api_key",
            "tenants[0].keys[0].key",
            "tenants[0].keys[1].key",
            "secret",
        ]


class TestUnits:
    @given(st.integers(0, 1 << 40), st.sampled_from(sorted(SIZE_UNITS)))
    def test_a_size_is_its_number_times_its_unit(self, number: int, unit: str):
        if number * SIZE_UNITS[unit] <= 1 << 60:
            assert (
                parse_size(f"{number}{unit}") == parse_size(f" {number} {unit.lower()} ") == number * SIZE_UNITS[unit]
            )

    @given(st.integers(0, 5_000), st.sampled_from(sorted(TIME_UNITS)))
    def test_a_time_is_its_number_times_its_unit(self, number: int, unit: str):
        assert parse_time(f"{number}{unit}") == pytest.approx(number * float(TIME_UNITS[unit]))

    @given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
    def test_times_add_up(self, hours: int, minutes: int, seconds: int):
        assert parse_time(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds

    @given(st.integers(0, 1 << 60))
    def test_plain_numbers_are_bytes(self, number: int):
        assert parse_size(number) == parse_size(str(number)) == number

    @given(st.floats(0, 1e9))
    def test_plain_numbers_are_seconds(self, number: float):
        assert parse_time(number) == number

    @given(st.text() | st.floats() | st.booleans() | st.none() | st.integers())
    def test_anything_else_is_a_value_error_and_nothing_worse(self, value: object):
        for parse in (parse_size, parse_time):
            try:
                assert parse(value) >= 0
            except ValueError as error:
                assert str(error).startswith("must be a ")

    @pytest.mark.parametrize(
        "value", ["", "-1s", "1h1h", "1 hour", "s", "1e3s", "nan", "٣s", True, None, "1h 5", -1, float("inf")]
    )
    def test_what_is_not_a_time(self, value: object):
        with pytest.raises(ValueError, match="must be a time"):
            parse_time(value)

    @pytest.mark.parametrize(
        "value", ["", "-1MiB", "1 MiBs", "MiB", "1e3", "0x10", "inf", True, None, -1, "9999999TiB"]
    )
    def test_what_is_not_a_size(self, value: object):
        with pytest.raises(ValueError, match="must be a size"):
            parse_size(value)


class TestExamples:
    ROOT = Path(__file__).parents[2]

    def test_the_deployed_example_holds_every_section_and_is_valid_also_uncommented(self, load):
        text = (self.ROOT / "deploy" / "warmgate.yaml").read_text()
        assert load(text).listen.workers == 2
        whole = load(re.sub(r"^# (?=[a-z_ ]+:|  )", "", text, flags=re.MULTILINE))
        assert set(Config.model_fields) == whole.model_fields_set

    def test_the_deployed_example_names_every_key_in_its_section(self):
        text = (self.ROOT / "deploy" / "warmgate.yaml").read_text()
        begins = re.compile(r"^(?:# )?([a-z_]+):", re.MULTILINE)
        parts = begins.split(text)[1:]
        sections = dict(zip(parts[::2], parts[1::2], strict=True))
        missing = [
            f"{section}: {key}"
            for section, field in Config.model_fields.items()
            for key in _keys_in(field.annotation)
            if not re.search(rf"\b{key}\b", sections[section])
        ]
        assert missing == []

    def test_the_readmes_examples_are_valid(self, load):
        blocks = re.findall(r"```yaml\n(.*?)```", (self.ROOT / "README.md").read_text(), re.DOTALL)
        configs = [load(block) for block in blocks if "faq.yaml:" not in block]
        assert configs and configs[0].tenants[0].name == "team-a"


def _keys_in(kind: object) -> set[str]:
    """The keys of every section within an annotation."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        inner = [_keys_in(field.annotation) for field in kind.model_fields.values()]
        return set(kind.model_fields).union(*inner)
    return set().union(*map(_keys_in, get_args(kind)))
