"""The canonical request: what must be one key, what must be two, and what must be refused."""

import json
import random
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.response.canonical import BadBody, Scope, identify, parse, respell, spell

SCOPE = Scope(dialect="chat", tenant="t1", namespace="", model="m1", revision="")
EXCLUDED = frozenset({"stream", "user"})

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
bodies = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), values, min_size=1, max_size=6)


def key(body: bytes, scope: Scope = SCOPE) -> bytes:
    return identify(scope, parse(body), EXCLUDED).key


def shuffled(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        items = list(value.items())
        rng.shuffle(items)
        return {name: shuffled(item, rng) for name, item in items}
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


@given(bodies, st.randoms(use_true_random=False))
def test_key_order_and_spacing_do_not_matter(body: dict[str, Any], rng: random.Random) -> None:
    plain = json.dumps(body).encode()
    pretty = json.dumps(shuffled(body, rng), indent=3, ensure_ascii=False).encode()
    assert key(plain) == key(pretty)


@given(bodies, st.data())
def test_any_change_in_an_included_field_changes_the_key(body: dict[str, Any], data: st.DataObject) -> None:
    included = [name for name in body if name not in EXCLUDED]
    if not included:
        return
    name = data.draw(st.sampled_from(included))
    other = data.draw(
        values.filter(lambda value: json.dumps(value, sort_keys=True) != json.dumps(body[name], sort_keys=True))
    )
    assert key(json.dumps(body).encode()) != key(json.dumps({**body, name: other}).encode())
    without = {other_name: value for other_name, value in body.items() if other_name != name}
    assert key(json.dumps(body).encode()) != key(json.dumps({**without, "a name that is not there": 1}).encode())


@given(bodies)
def test_excluded_fields_do_not_matter(body: dict[str, Any]) -> None:
    without = {name: value for name, value in body.items() if name not in EXCLUDED}
    assert key(json.dumps({**without, "stream": True, "user": "x"}).encode()) == key(json.dumps(without).encode())


@pytest.mark.parametrize(
    "variants",
    [
        ["1", "1.0", "true", '"1"', "[1]", "null", "10"],
        ["0", "0.0", "false", '""', "null", "{}", "[]"],
        ["9007199254740993", "9007199254740992", "9007199254740993.0"],
        ["18446744073709551616", "18446744073709551617", "-18446744073709551616"],
        ["0.1", "0.10000000000000000001", "0.2", "1e-1000", "0"],
        ['"é"', '"e\\u0301"', '"E"'],
        ["[1,2]", "[2,1]", "[1,2,2]", "[[1,2]]"],
    ],
)
def test_different_values_and_types_are_different_keys(variants: list[str]) -> None:
    keys = [key(b'{"seed":%s}' % text.encode()) for text in variants]
    assert len(set(keys)) == len(variants)
    assert key(b'{"other":1}') not in keys


@pytest.mark.parametrize(
    "same", [["0.7", "0.70", "7e-1", "7E-1", "70e-2"], ["1.0", "1.00", "10e-1"], ['"A"', '"\\u0041"']]
)
def test_one_value_in_several_spellings_is_one_key(same: list[str]) -> None:
    assert len({key(b'{"x":%s}' % text.encode()) for text in same}) == 1


@pytest.mark.parametrize("field", ["dialect", "tenant", "namespace", "model", "revision"])
def test_every_part_of_the_scope_counts(field: str) -> None:
    changed = Scope(
        **{
            **{name: getattr(SCOPE, name) for name in ("dialect", "tenant", "namespace", "model", "revision")},
            field: "z",
        }
    )
    assert key(b'{"a":1}', changed) != key(b'{"a":1}')


def test_scope_parts_cannot_be_shifted_into_one_another() -> None:
    one = Scope("chat", "a", "bc", "m", "")
    other = Scope("chat", "ab", "c", "m", "")
    assert key(b"{}", one) != key(b"{}", other)
    assert key(b"{}", Scope("chat", "a", "", "m", "", (("v", "1"),))) != key(b"{}", Scope("chat", "a", "", "m", ""))


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b'{"model":"m1","model":"m2"}', "twice"),
        (b'{"a":{"b":1,"b":1}}', "twice"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "Infinity"),
        (b'{"a":1e400}', "too large"),
        (b'{"a":1e-99999999999999999999}', "exponent"),
        (b'{"a":-0.0e99999999999999999999}', "exponent"),
        (b'{"a":"x\\ud835y"}', "surrogate"),
        (b'{"\\ud835":1}', "surrogate"),
        (b'{"a":"\xff"}', "UTF-8"),
        (b'{"a":1', "not valid JSON"),
        (b'{"a":1} x', "not valid JSON"),
        (b"[1]", "object"),
        (b"", "not valid JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b'{"a":' + b"[" * 400 + b"]" * 400 + b"}", "deep"),
        (b'{"a":' + b"9" * 5000 + b"}", "digits"),
        (b'{"a":"\x01"}', "not valid JSON"),
    ],
)
def test_what_two_parsers_could_read_differently_is_refused(body: bytes, word: str) -> None:
    with pytest.raises(BadBody, match=word):
        key(body)


def test_a_changed_body_keeps_every_digit_and_the_order_of_its_keys() -> None:
    body = parse(b'{"z":9007199254740993,"a":[0.70,36893488147419103232],"t":1e5}')
    assert respell(body) == b'{"z":9007199254740993,"a":[0.70,36893488147419103232],"t":1E+5}'


@settings(max_examples=300)
@given(values)
def test_the_canonical_spelling_is_json_for_the_same_value(value: Any) -> None:
    read = json.loads(spell(parse(json.dumps({"v": value}).encode())), parse_float=Decimal)["v"]
    assert read == json.loads(json.dumps(value), parse_float=Decimal)


def test_the_key_is_the_same_in_every_process() -> None:
    """Golden: a changed spelling must come with a new KEY_FORMAT."""
    body = (
        b'{"model":"m1","temperature":0.7,"messages":[{"role":"user","content":"Say \xc3\xa9"}],'
        b'"seed":18446744073709551617}'
    )
    found = identify(SCOPE, parse(body), EXCLUDED)
    assert found.key.hex() == "fb17df787ac53b4deb7fdde03db9b322"
    assert found.fingerprint.hex() == "65b8ad4a4570143ebc67671bb9db5da90ac388fae2c1ddcc73083bf5286f5b7d"
