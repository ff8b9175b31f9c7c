"""The prefix index: it finds what a plain search finds, forgets when told to, and stays within its bound."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstreams.prefix_index import FIRST_LIFETIME, Learned, PrefixIndex
from gateway.upstreams.prompt import CHUNK, canonical_text, chain, root_of, session_of


def chain_of(name: int, length: int) -> list[int]:
    return [name << 32 | i for i in range(length)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 70)), max_size=12), st.integers(0, 70))
def test_depths_are_those_of_a_plain_search(held, asked):
    index = PrefixIndex()
    chain = chain_of(1, 70)
    for slot, tier, depth in held:
        index.add(slot, chain[:depth], tier)
    found = index.match(chain[:asked], range(6))
    for slot in range(6):
        by_tier = [max((d for s, t, d in held if s == slot and t <= tier), default=0) for tier in range(3)]
        expected = [min(depth, asked) for depth in by_tier]
        shown = list(found.get(slot, (0,)))
        assert shown[-1] == expected[-1]
        assert shown == expected[: len(shown)]


@given(st.lists(st.sets(st.integers(0, 39)), min_size=1, max_size=5))
def test_one_that_lost_blocks_in_between_is_found_once_and_up_to_one_that_it_holds(held):
    index, chain = PrefixIndex(), chain_of(1, 40)
    for slot, links in enumerate(held):
        index.add(slot, [chain[link] for link in links])
    (depths,) = index.holders(chain, -1) or [[]]
    found = [(slot, depth) for depth, bits in depths for slot in range(len(held)) if bits >> slot & 1]
    assert [slot for slot, _ in sorted(found)] == [slot for slot, links in enumerate(held) if 0 in links]
    assert all(depth - 1 in held[slot] for slot, depth in found)


def test_only_the_slots_asked_for_are_found():
    index = PrefixIndex()
    index.add(0, chain_of(1, 3))
    index.add(1, chain_of(1, 2))
    assert index.match(chain_of(1, 5), [1]) == {1: (2,)}
    assert index.match([], [0, 1]) == {}


def test_what_is_discarded_is_not_found_and_takes_no_room():
    index = PrefixIndex()
    index.add(3, chain_of(1, 10))
    index.add(4, chain_of(1, 10))
    index.discard(3, chain_of(1, 10))
    assert index.match(chain_of(1, 10), [3, 4]) == {4: (10,)}
    index.discard(4, [*chain_of(1, 10), 99])
    assert len(index) == 0


def test_slots_are_used_again():
    index = PrefixIndex()
    assert [index.slot(name) for name in ("a", "b", "a")] == [0, 1, 0]
    index.free("a")
    assert index.slot("c") == 0


class TestLearned:
    def test_what_was_sent_is_believed_to_be_held(self):
        index = PrefixIndex()
        learned = Learned(index, 0, 1000)
        assert learned.send(chain_of(1, 4), 0.0).depth == 0
        assert index.match(chain_of(1, 6), [0]) == {0: (4,)}
        belief = learned.send(chain_of(1, 6), 10.0)
        assert (belief.depth, belief.age) == (4, 10.0)

    def test_it_holds_no_more_than_its_bound_and_keeps_the_newest(self):
        index = PrefixIndex()
        learned = Learned(index, 0, 100)
        for prompt in range(50):
            learned.send(chain_of(prompt, 10), float(prompt))
            assert len(learned) <= 100
            assert len(index) == len(learned)
        assert index.match(chain_of(49, 10), [0]) == {0: (10,)}
        assert index.match(chain_of(0, 10), [0]) == {}

    def test_a_prompt_longer_than_the_bound_keeps_its_head(self):
        index = PrefixIndex()
        Learned(index, 0, 5).send(chain_of(1, 50), 0.0)
        assert index.match(chain_of(1, 50), [0]) == {0: (5,)}

    def test_belief_fades_with_time(self):
        index = PrefixIndex()
        learned = Learned(index, 0, 1000)
        learned.send(chain_of(1, 4), 0.0)
        learned.send(chain_of(2, 4), FIRST_LIFETIME * 2)
        assert index.match(chain_of(1, 4), [0]) == {}

    def test_a_report_of_nothing_held_shortens_belief_and_one_of_all_held_lengthens_it(self):
        learned = Learned(PrefixIndex(), 0, 1000)
        learned.send(chain_of(1, 4), 0.0)
        belief = learned.send(chain_of(1, 4), 100.0)
        learned.correct(belief, 256, 0)
        assert learned.lifetime == 100.0
        belief = learned.send(chain_of(1, 4), 190.0)
        learned.correct(belief, 256, 256)
        assert learned.lifetime == 180.0

    def test_what_is_still_being_computed_teaches_nothing(self):
        learned = Learned(PrefixIndex(), 0, 1000)
        learned.send(chain_of(1, 4), 0.0)
        learned.correct(learned.send(chain_of(1, 4), 0.1), 256, 0)
        assert learned.lifetime == FIRST_LIFETIME

    def test_clearing_leaves_nothing(self):
        index = PrefixIndex()
        learned = Learned(index, 0, 1000)
        learned.send(chain_of(1, 4), 0.0)
        learned.clear()
        assert len(index) == len(learned) == 0

    def test_random_use_keeps_table_and_book_alike(self):
        rng, index = random.Random(5), PrefixIndex()
        books = [Learned(index, slot, 200) for slot in range(3)]
        for step in range(600):
            books[rng.randrange(3)].send(chain_of(rng.randrange(30), rng.randrange(1, 40)), step * 5.0)
            if rng.random() < 0.02:
                books[rng.randrange(3)].clear()
        bits = sum(holders.bit_count() for holders in index._tiers[0].values())
        assert bits == sum(map(len, books))


class TestPrompt:
    MESSAGES = ({"role": "system", "content": "s" * 600}, {"role": "user", "content": "hello " * 200})

    def hashes(self, **body: object) -> list[int]:
        return chain(canonical_text(body)[0], root_of("t"), CHUNK)

    def test_a_longer_conversation_begins_with_the_shorter(self):
        short = self.hashes(messages=[*self.MESSAGES])
        answer = {"role": "assistant", "content": "yes"}
        grown = self.hashes(messages=[*self.MESSAGES, answer, {"role": "user", "content": "and?" * 100}])
        assert len(short) > 5
        assert grown[: len(short)] == short

    def test_order_of_keys_does_not_matter_and_order_of_messages_does(self):
        turned = [dict(reversed(message.items())) for message in self.MESSAGES]
        assert self.hashes(messages=turned) == self.hashes(messages=[*self.MESSAGES])
        assert self.hashes(messages=[*reversed(self.MESSAGES)]) != self.hashes(messages=[*self.MESSAGES])

    def test_tools_come_first(self):
        with_tools = self.hashes(tools=[{"name": "f" * 300}], messages=[*self.MESSAGES])
        other_tools = self.hashes(tools=[{"name": "g" * 300}], messages=[*self.MESSAGES])
        assert not set(with_tools) & set(other_tools)

    def test_what_comes_before_the_first_user_turn_is_common_to_conversations(self):
        text, common = canonical_text({"tools": [{"name": "f"}], "messages": [*self.MESSAGES]})
        assert text[:common].startswith(b'[{"name":"f"}]')
        assert 600 < common < 680
        assert text[common:].lstrip(b",").startswith(b'{"content":"hello')
        assert canonical_text({"messages": [self.MESSAGES[1]]})[1] == 0
        assert canonical_text({"system": "s" * 50, "messages": "hello"})[1] == 53

    def test_two_tenants_share_no_hash(self):
        text, _ = canonical_text({"prompt": "x" * 2000})
        assert not set(chain(text, root_of("a"), CHUNK)) & set(chain(text, root_of("b"), CHUNK))

    def test_a_session_keeps_its_name_as_it_grows(self):
        begun = session_of({"messages": [*self.MESSAGES]}, 1)
        grown = session_of({"messages": [*self.MESSAGES, {"role": "assistant", "content": "x"}]}, 1)
        other = session_of({"messages": [self.MESSAGES[0], {"role": "user", "content": "bye"}]}, 1)
        assert begun == grown != other

    @pytest.mark.parametrize("name", ["prompt_cache_key", "conversation"])
    def test_the_caller_may_name_the_session(self, name):
        assert session_of({name: "k", "messages": [{"role": "user", "content": "1"}]}, 1) == session_of(
            {name: "k", "messages": []}, 1
        )

    @pytest.mark.parametrize(
        "body", [{}, {"messages": 5}, {"prompt": ["a", "b"]}, {"input": [[1, 2]]}, {"prompt": None}]
    )
    def test_odd_bodies_have_a_text_and_a_session(self, body):
        text, common = canonical_text(body)
        assert isinstance(text, bytes)
        assert common == 0
        assert session_of(body, 1) > 0
