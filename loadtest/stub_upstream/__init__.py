"""A scripted upstream: speaks the OpenAI and Anthropic dialects, counts its calls, and misbehaves on demand.

It answers `ans-<call number>`, so that an answer from a cache can be told from a fresh one by its text. In tests:

    async with StubUpstream() as u:
        u.reply(error(429), answer(finish_reason="length"))     # for the next two calls; then `ans-3`, `ans-4`, …
        u.always(answer().cut(after=3, then="reset"))           # or for all calls to come
        ...                                                     # point the gateway at u.url
        assert u.n == 2 and u.calls[0].json["model"] == "m1"

By hand: `python -m loadtest.stub_upstream --port 9001 --model m1`.
"""

from loadtest.stub_upstream.answers import known_vector
from loadtest.stub_upstream.call import Call
from loadtest.stub_upstream.reply import Reply
from loadtest.stub_upstream.script import answer, body, delta, error, events, json_body, raw
from loadtest.stub_upstream.server import Script, StubUpstream

__all__ = [
    "Call",
    "Reply",
    "Script",
    "StubUpstream",
    "answer",
    "body",
    "delta",
    "error",
    "events",
    "json_body",
    "known_vector",
    "raw",
]
