"""The memo from request bodies to plans."""

from typing import cast

from gateway.memo import Memo
from gateway.plan import Plan

SCOPE = ("chat", "t1", ("",))


def plan() -> Plan:
    return cast(Plan, object())  # the memo does not look into plans


def test_a_body_is_known_under_its_own_scope_only() -> None:
    memo, one = Memo(1_000_000), plan()
    memo.put(SCOPE, b"{}", one)
    found = memo.get(SCOPE, b"{}")
    assert found is not None
    assert found.plan is one
    assert memo.get(("chat", "t2", ("",)), b"{}") is None
    assert memo.get(SCOPE, b"{ }") is None


def test_what_was_made_ready_stays_when_the_full_path_sees_the_request_again() -> None:
    memo = Memo(1_000_000)
    memo.put(SCOPE, b"{}", plan())
    before = memo.get(SCOPE, b"{}")
    memo.put(SCOPE, b"{}", plan())
    assert memo.get(SCOPE, b"{}") is before


def test_it_holds_no_more_than_it_may() -> None:
    memo = Memo(100_000)
    for number in range(1000):
        memo.put(SCOPE, b"%d" % number, plan())
    assert sum(memo.get(SCOPE, b"%d" % number) is not None for number in range(1000)) <= 100_000 // 4096
