"""Whom a call is sent to, one after another: the upstreams of its model, then those of the models that may stand in for
it, or its own once more after a pause. All of it only as long as nothing of an answer has been passed on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager

from gateway.encoding import EncodingError
from gateway.http import Request
from gateway.plan import Plan, Planner
from gateway.split import Counted, Send, Sent, Spending, Splits
from gateway.upstreams.client import UpstreamError, UpstreamResponse
from gateway.upstreams.pool import Member, Pool, for_whole
from gateway.upstreams.router import Asked, Route, Router
from policies.retry import Retries


class Attempt:
    """A call to one upstream, counted there, and told to the ledger, until it is closed; a context for that.

    ``answer``: what it came to, where it was made before there was a flight (`gateway.direct`). ``taken``: somebody has
    entered it, and will close it.
    """

    def __init__(self, route: Route, counted: AbstractContextManager[Spending]) -> None:
        self.route = route
        self.call = counted.__enter__()
        self.answer: UpstreamResponse | UpstreamError | EncodingError | None = None
        self.taken = False
        self._closed = False
        self._counted = counted

    def close(self) -> None:
        """It is over. May be called twice."""
        if not self._closed:
            self._closed = True
            self._counted.__exit__(None, None, None)
            self.route.close()

    def __enter__(self) -> Spending:
        self.taken = True
        return self.call

    def __exit__(self, *_: object) -> None:
        self.close()


class Attempts:
    """``plan`` is what is sent now; `next` says to whom, and after a failure `another` whether there is anybody left.

    A request with side effects is sent once, unless it surely did not arrive.
    """

    def __init__(
        self,
        plan: Plan,
        request: Request,
        members: Sequence[Member],
        planner: Planner,
        pool: Pool,
        router: Router,
        splits: Splits,
        retries: Retries,
    ) -> None:
        self.plan = plan
        self._first = plan
        self._request = request
        self._members = tuple(members)
        self._left = list(members)
        self._fallbacks = list(plan.model.fallback) if plan.repeatable and plan.dialect.interchangeable else []
        self._prefills = [member for member in members if member.config.role == "prefill"]
        self._sent = False
        self._planner, self._pool, self._router, self._splits = planner, pool, router, splits
        self._retries = retries
        self._asked: Asked | None = None
        self._rounds = 0
        self._pause = 0.0

    @property
    def fallback(self) -> str:
        """The model that stands in, if one does."""
        return self.plan.model.target if self.plan is not self._first else ""

    @property
    def left(self) -> bool:
        """Whether others of the model's upstreams have not been asked in this round."""
        return bool(self._left) and self._first.repeatable

    async def next(self) -> Route:
        """The best of those who are left; it is held from now on."""
        if self._pause:
            await asyncio.sleep(self._pause)
            self._pause = 0.0
        if self._asked is None:
            plan = self.plan
            salt = self._planner.salt(plan.caller.tenant)
            size, path = len(plan.outgoing), plan.dialect.path
            self._asked = await self._router.read(plan.model.target, path, plan.body, size, salt, self._left)
        route = self._router.route(self._asked, for_whole(self._left))
        self._left.remove(route.member)
        return route

    async def send(self, attempt: Attempt, send: Send, counted: Counted) -> Sent:
        """Sends what is sent now to the upstream of an attempt, split if that pays; once it has failed, whole. Raises
        what an attempt that was made before has failed of.
        """
        assert self._asked is not None
        route, answer = attempt.route, attempt.answer
        again, self._sent = self._sent, True
        if answer is not None:
            if not isinstance(answer, UpstreamResponse):
                raise answer
            return Sent(self._splits, route, answer, None, self._splits.now())
        return await self._splits.send(self.plan, self._asked, route, self._prefills, send, counted, again=again)

    def begin_with(self, attempt: Attempt) -> Attempt:
        """Takes over an attempt that was begun before these."""
        self._asked = attempt.route.asked
        self._left = [member for member in self._left if member is not attempt.route.member]
        return attempt

    async def another(self, *, sent: bool, retry_after: float | None = None) -> bool:
        """Whether there is somebody to turn to after a failure. ``sent``: the request may have arrived.
        ``retry_after``: the upstream asks to come back in so many seconds.
        """
        if sent and not self._first.repeatable:
            return False
        return bool(self._left) or await self._stand_in() or self._again(sent=sent, retry_after=retry_after)

    async def _stand_in(self) -> bool:
        while self._fallbacks:
            model = self._planner.model(self._fallbacks.pop(0))
            members = await self._pool.serving(model.target, self._request)
            if members:
                self.plan, self._left, self._asked = self._planner.instead(self._first, model), members, None
                return True
        return False

    def _again(self, *, sent: bool, retry_after: float | None) -> bool:
        """Another round, for what surely did not arrive or was asked to come again."""
        if self.plan is not self._first or not self._members or (sent and retry_after is None):
            return False
        pause = self._retries.pause(self._rounds, retry_after, random.random())
        if pause is None:
            return False
        self._pause, self._left = pause, list(self._members)
        self._rounds += 1
        return True
