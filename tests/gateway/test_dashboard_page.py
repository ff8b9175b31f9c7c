"""The page in a real browser: what an operator sees, does and hears."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from cache.response.tags import place_of
from gateway.dashboard import overview
from gateway.ledger import OUTCOMES, Call, Row
from gateway.sentinels import Light
from loadtest.stub_upstream import StubUpstream
from tests.harness import Running, running_gateway, upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
AXE = Path(__file__).parent / "axe" / "axe.min.js"
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield launched
        await launched.close()


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    """A gateway whose live numbers come fast."""
    for name, (length, step, _) in overview.RANGES.items():
        monkeypatch.setitem(overview.RANGES, name, (length, step, 0.5))
    monkeypatch.setattr("gateway.dashboard.routes._FRESH", 0.05)
    monkeypatch.setattr("gateway.sentinels.rounds.FIRST", 1e9)
    async with (
        StubUpstream(models=("m1",)) as u,
        running_gateway({"upstreams": [upstream(u.url, models=["m1"])], "sentinels": {}}) as running,
    ):
        yield running


@asynccontextmanager
async def opened(browser: Browser, url: str, size: dict[str, int] = DESKTOP, **more: Any) -> AsyncIterator[Page]:
    """The page at ``url``; at its end, it must have had no error, and asked nobody but the gateway."""
    context = await browser.new_context(viewport=size, **more)  # type: ignore[arg-type]
    page = await context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: faults.append(request.url) if not request.url.startswith(origin) else None)
    origin = re.match(r"http://[^/]+", url).group()  # type: ignore[union-attr]
    try:
        await page.goto(url)
        yield page
        expected = ("Failed to load resource: the server responded", "blob:", "data:")
        assert [fault for fault in faults if not fault.startswith(expected)] == []
    finally:
        await context.close()


def fill(gateway: Running, **more: Any) -> None:
    """One request of each outcome, a minute ago, two models and two tenants."""
    for number, outcome in enumerate(OUTCOMES):
        row = Row(at=time.time() - 60, tenant=f"t{number % 2}", model=f"m{number % 2}", endpoint="/v1/chat/completions")
        row.outcome, row.latency, row.ttft, row.stream = outcome, 0.01 * (number + 1), 0.005, True
        row.status, row.request_id = 200 if outcome != "error" else 502, f"id-{number}"
        row.usage = {"prompt": 1000, "output": 50, "cached": 400} if outcome != "error" else None
        row.upstream = "u"
        row.reason = "connect: refused" if outcome == "error" else ""
        for name, value in more.items():
            setattr(row, name, value)
        gateway.app.runtime.ledger.record(row)
        if outcome == "miss":
            call = Call(row.at, row.tenant, row.model, row.endpoint, "u", outcome, True, row.usage)
            gateway.app.runtime.ledger.spent(call)


def tile(page: Page, name: str) -> Any:
    return page.locator(".tile", has=page.get_by_text(name, exact=True)).locator(".big")


async def test_it_shows_the_numbers_and_follows_them_live(browser: Browser, gateway: Running) -> None:
    fill(gateway)
    async with opened(browser, f"{gateway.url}/dashboard?range=15m") as page:
        await expect(tile(page, "Requests")).to_have_text("8")
        await expect(tile(page, "Hit rate")).to_have_text("62.5 %")
        await expect(tile(page, "Tokens saved")).to_have_text("5,250")
        await expect(tile(page, "Cached by providers")).to_have_text("400")
        await expect(tile(page, "Money saved")).to_have_text("unknown")  # no prices: not zero
        await expect(page.locator("#live")).to_contain_text("Live")
        await expect(page.locator("#outcomes tbody tr")).to_have_count(8)
        await expect(page.locator("#recent tbody tr")).to_have_count(8)
        await expect(page.locator("#reasons")).to_contain_text("connect")
        await expect(page.locator("#upstreams tbody tr")).to_have_count(1)
        fill(gateway)
        await expect(tile(page, "Requests")).to_have_text("16")
        await expect(page.locator("#recent tbody tr")).to_have_count(16)


async def test_filters_narrow_what_is_shown_and_live_in_the_address(browser: Browser, gateway: Running) -> None:
    fill(gateway)
    async with opened(browser, f"{gateway.url}/dashboard?range=15m") as page:
        await expect(tile(page, "Requests")).to_have_text("8")
        await page.get_by_role("combobox", name="Tenant").select_option("t1")
        await expect(tile(page, "Requests")).to_have_text("4")
        await page.get_by_role("combobox", name="Model").select_option("m0")  # of the other tenant
        await expect(tile(page, "Requests")).to_have_text("0")
        await expect(page.locator("#recent")).to_contain_text("Nothing in this range")
        await page.get_by_role("combobox", name="Tenant").select_option("")
        await expect(tile(page, "Requests")).to_have_text("4")
        await page.get_by_text("6h", exact=True).click()
        await expect(page).to_have_url(re.compile(r"range=6h&model=m0$"))
        await page.reload()
        await expect(page.get_by_role("combobox", name="Model")).to_have_value("m0")
        await expect(page.locator("input[value='6h']")).to_be_checked()
        await expect(tile(page, "Requests")).to_have_text("4")


async def test_an_empty_gateway_says_how_to_begin(browser: Browser, gateway: Running) -> None:
    async with opened(browser, f"{gateway.url}/dashboard") as page:
        await expect(page.get_by_role("heading", name="Send the first request")).to_be_visible()
        command = await page.locator("#snippet").text_content() or ""
        assert f"curl {gateway.url}/v1/chat/completions" in command
        assert '"model":"m1"' in command
        for outcome in ("miss", "exact"):  # as it says: send this, then send it again
            shell = await asyncio.create_subprocess_exec("sh", "-c", command, stdout=-1, stderr=-1)
            told, _ = await shell.communicate()
            assert b"ans-1" in told
            await expect(page.locator("#recent tbody tr").first).to_contain_text(outcome.title())
        await expect(page.locator("#empty")).to_be_hidden()


async def test_hostile_names_are_shown_as_text(browser: Browser, gateway: Running) -> None:
    fill(gateway, model=HOSTILE, tenant=HOSTILE, reason=HOSTILE, request_id=HOSTILE[:20], upstream=HOSTILE)
    async with opened(browser, f"{gateway.url}/dashboard?range=15m") as page:
        await expect(page.locator("#models tbody th").first).to_have_text(HOSTILE)
        await expect(page.locator("#recent tbody tr").first).to_contain_text(HOSTILE)
        await expect(page.locator("#reasons li").first).to_contain_text("<img src=x onerror=")
        await page.get_by_role("combobox", name="Model").select_option(HOSTILE)
        await expect(tile(page, "Requests")).to_have_text("8")
        assert await page.evaluate("window.hacked") is None
        assert await page.locator("main img").count() == 0


def light_up(gateway: Running, *lights: Light) -> None:
    """As if a round had found this."""
    spent = Counter(requests=4, prompt=760, cached=256, output=4)
    gateway.app.runtime.board.show(lights, spent, time.time())


RED = Light("events", "red", "none arrive", "upstreams[].kv_events", upstream="vllm-a")


async def test_sentinels_stay_in_the_background_until_something_fails_silently(
    browser: Browser, gateway: Running
) -> None:
    async with opened(browser, f"{gateway.url}/dashboard?range=15m") as page:
        await expect(page.locator("#empty")).to_be_visible()
        card, notice = page.locator("#sentinels-card"), page.locator("#notice")
        await expect(card).to_contain_text("No round has been made yet")
        light_up(gateway, Light("memory", "green"), Light("salt", "grey", "no salts are sent"))
        await expect(card.locator(".lights li")).to_have_count(2)
        await expect(card).to_contain_text("costs upstreams 320 requests and 60.8K prompt tokens an hour")
        await expect(notice).to_be_hidden()
        light_up(gateway, Light("memory", "green"), RED)
        await expect(notice).to_contain_text("events vllm-a")
        await expect(card.locator(".alarms li")).to_have_text(re.compile("red.*none arrive.*upstreams\\[\\].kv_events"))
        await expect(card.locator(".lights li")).to_have_text("memory: works")
        light_up(gateway, Light("memory", "green"), Light("events", "green", upstream="vllm-a"))
        await expect(notice).to_be_hidden()
        await expect(card.locator(".alarms li")).to_have_count(0)


async def test_what_is_lost_and_what_would_mend_it(
    browser: Browser, gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.prefix_health.SHARE", 1e9)
    rules = "Answer with care, in full sentences, and say what is not known to you. " * 3
    gateway.app.runtime.prefix_health._look_every = 0.0
    for number in range(3):
        system = {"role": "system", "content": f"It is 10:0{number}. {rules}"}
        body = {"model": HOSTILE, "temperature": 0, "messages": [system, {"role": "user", "content": "Why?"}]}
        for seed in (1, 2):
            gateway.app.runtime.prefix_health.look("t", HOSTILE, body)
            body |= {"model": "m1", "seed": seed}
            assert (await gateway.client.post("/v1/chat/completions", json=body)).status_code == 200
    async with opened(browser, f"{gateway.url}/dashboard?range=15m") as page:
        card = page.locator("#ladder-card")
        await expect(card).to_contain_text(re.compile(r"hits are 0\s%.* of 6; an ideal cache would reach 50\.0\s%"))
        await expect(card.locator(".bars li")).to_contain_text("fields: seed (3)")
        faults = page.locator("#prefixes-card tbody tr")
        await expect(faults).to_have_count(2)
        await expect(faults.filter(has_text="img src=x")).to_contain_text("messages[0].content : 9")
        await expect(faults.first).to_contain_text("Put the time behind all that stays the same")
        assert await page.evaluate("window.hacked") is None


async def test_what_is_disarmed_is_said_and_what_engines_were_spared_is_shown(
    browser: Browser, gateway: Running
) -> None:
    runtime = gateway.app.runtime
    runtime.trust.disarms = True
    fill(gateway)
    await runtime.arm(place_of("t0", "n", HOSTILE), armed=False)
    for agreed in [True] * 39 + [False]:
        runtime.trust.compared(place_of("t1", "", "m1"), agreed)
    async with opened(browser, f"{gateway.url}/dashboard?range=15m") as page:
        await expect(page.locator("#notice")).to_contain_text(f"since answers disagree: {HOSTILE} of t0 / n.")
        places = page.locator("#savings-card table").last.locator("tbody tr")
        await expect(places.first.locator(".badge")).to_have_text("disarmed")
        await expect(places.nth(1)).to_contain_text("97.5")
        await expect(places.nth(1).locator(".badge")).to_have_text("armed")
        engine = page.locator("#effective-card tbody tr").first
        await expect(engine).to_contain_text("unknown")  # neither watts nor prices
        await expect(engine).to_contain_text("engines")
        assert await page.evaluate("window.hacked") is None


async def test_what_an_upstream_is_called_or_says_cannot_act_on_the_page_of_its_light(
    browser: Browser, gateway: Running
) -> None:
    light_up(
        gateway,
        Light("prefix", "red", HOSTILE, HOSTILE, upstream=HOSTILE),
        Light("tier", "green", "", "", "u", HOSTILE),
    )
    async with opened(browser, f"{gateway.url}/dashboard") as page:
        await expect(page.locator(".alarms li strong")).to_have_text(f"prefix {HOSTILE}")
        await expect(page.locator(".lights li")).to_contain_text(HOSTILE)
        assert await page.evaluate("window.hacked") is None
        assert await page.locator("main img").count() == 0


async def test_light_and_dark_by_wish_and_by_button(browser: Browser, gateway: Running) -> None:
    fill(gateway)
    ground = "getComputedStyle(document.body).backgroundColor"
    async with opened(browser, f"{gateway.url}/dashboard", color_scheme="dark") as page:
        dark = await page.evaluate(ground)
        await page.get_by_role("button", name="Switch between light and dark").click()
        light = await page.evaluate(ground)
        assert dark != light
        await page.reload()
        assert await page.evaluate(ground) == light  # it is remembered
    async with opened(browser, f"{gateway.url}/dashboard", color_scheme="light") as page:
        assert await page.evaluate(ground) == light


async def test_a_phone_shows_all_of_it_without_scrolling_sideways(browser: Browser, gateway: Running) -> None:
    fill(gateway)
    light_up(gateway, RED, Light("memory", "green"))
    async with opened(browser, f"{gateway.url}/dashboard?range=15m", PHONE) as page:
        await expect(tile(page, "Requests")).to_be_visible()
        await expect(page.locator("#recent tbody tr")).to_have_count(8)
        assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        await expect(page.locator("#chart-requests canvas")).to_be_visible()


async def test_charts_can_be_read_by_keyboard_and_as_tables(browser: Browser, gateway: Running) -> None:
    fill(gateway)
    async with opened(browser, f"{gateway.url}/dashboard?range=15m") as page:
        chart = page.locator("#chart-requests .plot")
        await expect(chart).to_have_attribute("aria-label", re.compile("Requests by outcome.*Exact 1.*Error 1"))
        await chart.focus()
        for _ in range(3):
            await page.keyboard.press("ArrowLeft")
        tip = page.locator("#chart-requests .tip")
        await expect(tip).to_be_visible()
        await expect(tip).to_contain_text(re.compile(r"\d\d:\d\d"))
        button = page.locator("#chart-requests").get_by_role("button", name="Table")
        await button.focus()
        await page.keyboard.press("Enter")
        await expect(button).to_have_attribute("aria-pressed", "true")
        cells = page.locator("#chart-requests tbody tr", has_text="1")
        await expect(page.locator("#chart-requests tbody tr")).to_have_count(15)
        await expect(cells.first).to_be_visible()
        key = page.locator("#chart-hits .legend button").first
        await key.click()
        await expect(key).to_have_attribute("aria-pressed", "false")


async def test_the_ledger_can_be_saved_as_csv(browser: Browser, gateway: Running, tmp_path: Path) -> None:
    fill(gateway)
    async with opened(browser, f"{gateway.url}/dashboard?range=15m&tenant=t1") as page:
        for button, lines in (("Requests as CSV", 4), ("Ledger as CSV", 4)):
            async with page.expect_download() as waiting:
                await page.get_by_role("button", name=button).click()
            saved = tmp_path / "saved.csv"
            await (await waiting.value).save_as(saved)
            assert saved.read_text().count("\n") == lines + 1


async def test_a_locked_dashboard_opens_with_the_admin_key_and_for_a_tenant_with_its_own(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ADMIN", "T0"):
        monkeypatch.setenv(name, f"key-{name}")
    config = {
        "upstreams": [],
        "engine": "off",
        "sentinels": {},
        "admin": {"key": "env:ADMIN"},
        "tenants": [{"name": "t0", "keys": ["env:T0"]}],
    }
    async with running_gateway(config) as gateway:
        fill(gateway)
        async with opened(browser, f"{gateway.url}/dashboard") as page:
            dialog = page.get_by_role("dialog")
            await expect(dialog).to_be_visible()
            await page.locator("#key").fill("wrong")
            await page.keyboard.press("Enter")
            await expect(dialog).to_contain_text("neither the admin key nor a tenant's")
            await page.locator("#key").fill("key-ADMIN")
            await page.keyboard.press("Enter")
            await expect(tile(page, "Requests")).to_have_text("8")
            await expect(page.locator("#sentinels-card")).to_be_visible()
            assert await page.evaluate("localStorage.length") == 0  # the key is in this tab only
            await page.get_by_role("button", name="Lock").click()
            await expect(dialog).to_be_visible()
            await expect(page.locator("#filled")).to_be_hidden()
            await page.locator("#key").fill("key-T0")
            await page.keyboard.press("Enter")
            await expect(tile(page, "Requests")).to_have_text("4")
            await expect(page.locator("#whose")).to_have_text("tenant t0")
            await expect(page.locator("#upstreams-card")).to_be_hidden()
            await expect(page.locator("#sentinels-card")).to_be_hidden()
            await expect(page.locator("#tenant-pick")).to_be_hidden()


async def test_it_says_that_the_connection_is_lost_and_finds_it_again(browser: Browser, gateway: Running) -> None:
    fill(gateway)
    async with opened(browser, f"{gateway.url}/dashboard?range=15m") as page:
        await expect(page.locator("#live")).to_contain_text("Live")
        await page.route("**/api/live*", lambda route: route.fulfill(status=503, json={"detail": "The ledger rests."}))
        gateway.app.runtime.closing.set()
        await expect(page.locator("#live")).to_contain_text("Reconnecting")
        await expect(page.locator("#notice")).to_have_text("The ledger rests.")
        gateway.app.runtime.closing.clear()
        await page.unroute("**/api/live*")
        await expect(page.locator("#live")).to_contain_text("Live")


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
async def test_nothing_stands_in_the_way_of_anyone(
    browser: Browser, gateway: Running, scheme: str, size: dict[str, int]
) -> None:
    """axe-core finds no fault worth the name: roles, labels, contrast, order."""
    async with opened(browser, f"{gateway.url}/dashboard?range=15m", size, color_scheme=scheme) as page:
        await expect(page.locator("#empty")).to_be_visible()
        await page.evaluate(AXE.read_text())
        assert await _faults(page) == []
        fill(gateway)
        light_up(gateway, RED, Light("memory", "green"), Light("salt", "grey", "no salts are sent"))
        await expect(page.locator("#recent tbody tr")).to_have_count(8)
        await expect(page.locator(".alarms li")).to_have_count(1)
        await page.locator("#chart-hits").get_by_role("button", name="Table").click()
        assert await _faults(page) == []


async def _faults(page: Page) -> list[str]:
    found = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{fault['id']} ({fault['impact']}): {fault['help']}: {[node['html'][:160] for node in fault['nodes'][:3]]}"
        for fault in found["violations"]
        if fault["impact"] in ("serious", "critical", "moderate")
    ]
