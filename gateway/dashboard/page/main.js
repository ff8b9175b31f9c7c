/* The page: what is asked for, the stream of answers, and where each part of an answer goes. */

import { Locked, key, live, save } from "./api.js";
import { Chart } from "./charts.js";
import { h, show } from "./dom.js";
import { count, dollars, seconds, share } from "./format.js";
import * as advice from "./advice.js";
import * as parts from "./parts.js";
import { tiles } from "./tiles.js";

const $ = (id) => document.getElementById(id);
const form = $("filters");
const line = (key_, label, color, dashed = false) => ({ key: key_, label, color, dashed });

const charts = {
  requests: new Chart($("chart-requests"), { stacked: true, total: "sum", format: count, series: Object.entries(parts.OUTCOMES).map(([name, label]) => line(name, label, name)) }),
  hits: new Chart($("chart-hits"), { format: (value) => share(value, 0), most: 1, series: [line("hit_rate", "by requests", "exact"), line("token_hit_rate", "by tokens", "coalesced", true)] }),
  times: new Chart($("chart-times"), { log: true, format: seconds, series: [line("hit_p50", "hit p50", "exact"), line("hit_p95", "hit p95", "exact", true), line("upstream_p50", "upstream p50", "provider"), line("upstream_p95", "upstream p95", "provider", true)] }),
  tokens: new Chart($("chart-tokens"), { stacked: true, total: "sum", format: count, series: [line("saved_tokens", "saved here", "exact"), line("provider_cached_tokens", "cached by provider", "provider"), line("computed_prompt_tokens", "prompt computed", "computed"), line("unsplit_prompt_tokens", "prompt, not told", "unsplit"), line("upstream_output_tokens", "output computed", "output")] }),
  money: new Chart($("chart-money"), { total: "sum", format: dollars, series: [line("saved_usd", "saved", "exact"), line("cost_usd", "spent", "provider")] }),
};

let time = "latency";
let latest = null;
let stop = new AbortController();

const which = h("button", { type: "button", className: "quiet", on: { click: () => {
  time = time === "latency" ? "ttft" : "latency";
  nameTime();
  if (latest) drawTimes(latest);
} } });
function nameTime() { which.textContent = time === "latency" ? "Whole answer" : "First token"; which.setAttribute("aria-label", `Showing the ${time === "latency" ? "whole answer; show the first token" : "first token; show the whole answer"}`); }
nameTime();
$("chart-times").querySelector(".acts").prepend(which);

/* What is asked for lives in the address, so that it can be kept and shared. */
function asked() {
  const given = Object.fromEntries(new FormData(form));
  return Object.fromEntries(Object.entries(given).filter(([, value]) => value !== ""));
}

function restore() {
  const given = new URLSearchParams(location.search);
  for (const name of ["tenant", "model"]) {
    const value = given.get(name);
    if (value) { form.elements[name].append(new Option(value, value)); form.elements[name].value = value; }
  }
  const range = form.querySelector(`input[name="range"][value="${CSS.escape(given.get("range") ?? "1h")}"]`);
  if (range) range.checked = true;
}

function choose(select, values, all) {
  const chosen = select.value;
  const wanted = [...new Set([...values.filter((value) => value !== ""), ...(chosen ? [chosen] : [])])];
  if ([...select.options].slice(1).map((option) => option.value).join("\n") === wanted.join("\n")) return;
  select.replaceChildren(new Option(all, ""), ...wanted.map((value) => new Option(value, value)));
  select.value = chosen;
}

function say(state, text) {
  $("live").dataset.state = state;
  $("live").lastElementChild.textContent = text;
}

function notice(text) {
  if ($("notice").textContent !== text) $("notice").textContent = text;
  show($("notice"), Boolean(text));
}

function draw(data) {
  latest = data;
  const operator = data.viewer.tenant === null;
  const empty = data.total.requests === 0 && data.choices.models.length === 0;
  show($("empty"), empty);
  show($("filled"), !empty);
  show($("tenant-pick"), operator && data.choices.tenants.filter(Boolean).length > 1);
  show($("whose"), !operator);
  $("whose").textContent = operator ? "" : `tenant ${data.viewer.tenant}`;
  show($("leave"), Boolean(key.get()));
  watch(operator ? data : null);
  notice(data.ledger.problem ? `The ledger cannot be written (${data.ledger.problem}). Requests are served all the same; what is counted waits in memory.` : operator ? alarm(data) : "");
  choose(form.elements.tenant, data.choices.tenants, "All tenants");
  choose(form.elements.model, data.choices.models, "All models");
  if (empty) return greet(data);
  $("tiles").replaceChildren(...tiles(data));
  const { series, range } = data;
  charts.requests.set(series.at, series.requests, range.step);
  charts.hits.set(series.at, series, range.step);
  charts.tokens.set(series.at, series, range.step);
  charts.money.set(series.at, series, range.step);
  drawTimes(data);
  show($("chart-money"), data.setup.priced);
  for (const name of ["outcomes", "models", "reasons", "recent"]) $(name).replaceChildren(parts[name](data));
  for (const name of ["tiers", "upstreams", "tenants"]) {
    show($(`${name}-card`), operator && (name !== "tenants" || data.tenants.length > 1));
    if (operator) $(name).replaceChildren(parts[name](data));
  }
  show($("ladder-card"), operator);
  show($("prefixes-card"), operator && data.prefixes.findings.length > 0);
  if (operator) {
    for (const name of ["ladder", "prefixes"]) {
      $(name).replaceChildren(advice[name](data));
      $(`${name}-note`).textContent = advice[`${name}Note`](data);
    }
  }
  show($("effective-card"), operator);
  if (operator) {
    $("effective").replaceChildren(advice.effective(data));
    $("effective-note").textContent = advice.effectiveNote(data);
  }
  show($("slo-card"), data.slo.length > 0);
  $("slo").replaceChildren(parts.goodput(data));
  show($("savings-card"), data.savings.held_out > 0 || data.agreement.length > 0);
  $("savings").replaceChildren(parts.savings(data), advice.agreement(data));
  show($("questions-card"), data.questions.length > 0);
  $("questions").replaceChildren(parts.questions(data));
  $("recent-note").textContent = data.total.hits ? "of hits a sample, of all others each" : "";
}

/* What fails silently is the operator's business, on an empty page as well. */
function watch(data) {
  const on = data !== null && data.sentinels.state !== "off";
  show($("sentinels-card"), on);
  if (!on) return;
  $("sentinels").replaceChildren(parts.sentinels(data));
  $("sentinels-note").textContent = parts.sentinelsNote(data);
}

function alarm(data) {
  const red = data.sentinels.lights.filter((light) => light.state === "red").map(parts.lightName);
  const off = data.agreement.filter((line) => line.state === "disarmed").map(advice.placeName);
  if (off.length) return `Not answered from the cache, since answers disagree: ${off.join(", ")}. See Savings, measured.`;
  return red.length ? `Something fails silently: ${red.join(", ")}. See Sentinels below for the likely cause.` : "";
}

function drawTimes(data) {
  const { series, range } = data;
  const columns = Object.fromEntries(["hit_p50", "hit_p95", "upstream_p50", "upstream_p95"].map((name) => [name, series.times[`${time}_${name}`]]));
  charts.times.set(series.at, columns, range.step);
}

function greet(data) {
  const model = data.setup.models[0] ?? "MODEL";
  const body = JSON.stringify({ model, temperature: 0, messages: [{ role: "user", content: "What is the capital of France?" }] });
  const secret = data.setup.open ? "" : ` \\\n  -H "authorization: Bearer $YOUR_KEY"`;
  $("snippet").textContent = `curl ${location.origin}/v1/chat/completions \\\n  -H "content-type: application/json"${secret} \\\n  -d '${body.replaceAll("'", "'\\''")}'`;
  $("base").textContent = `${location.origin}/v1`;
}

async function follow() {
  stop.abort();
  const mine = (stop = new AbortController());
  const query = asked();
  history.replaceState(null, "", `${location.pathname}?${new URLSearchParams(query)}`);
  for (let wait = 1; !mine.signal.aborted; wait = Math.min(wait * 2, 15)) {
    try {
      for await (const data of live(query, mine.signal, notice)) {
        if (mine.signal.aborted) return;
        draw(data);
        say("live", "Live");
        wait = 1;
      }
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof Locked) return ask(error.message);
      say("lost", "Reconnecting");
      if (!(error instanceof TypeError)) notice(error.message);
    }
    await new Promise((resume) => setTimeout(resume, wait * 1000));
  }
}

function ask(why) {
  say("waiting", "Locked");
  $("lock-why").textContent = key.get() ? why : `${why} Enter the admin key to see everything, or a tenant's key to see that tenant's own numbers.`;
  key.forget();
  if (!$("lock").open) $("lock").showModal();
}

form.addEventListener("change", follow);
form.addEventListener("submit", (event) => event.preventDefault());
$("lock").addEventListener("cancel", (event) => event.preventDefault());
$("lock-form").addEventListener("submit", () => {
  key.set($("key").value.trim());
  $("key").value = "";
  follow();
});
$("leave").addEventListener("click", () => { key.forget(); form.reset(); show($("filled"), false); watch(null); notice(""); follow(); });
$("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText($("snippet").textContent);
  $("copy").textContent = "Copied";
  setTimeout(() => { $("copy").textContent = "Copy"; }, 2000);
});
for (const button of document.querySelectorAll("[data-export]")) {
  button.addEventListener("click", () => {
    const { range, ...where } = asked();
    const query = { from: `-${range}`, ...where, ...(button.dataset.export === "rows" ? { limit: 10_000 } : { by: "tenant,model,endpoint,upstream,outcome,stream" }) };
    save(button.dataset.export, query, button.dataset.export === "rows" ? "requests.csv" : "ledger.csv").catch((error) => notice(error.message));
  });
}

const dark = matchMedia("(prefers-color-scheme: dark)");
function repaint() { for (const chart of Object.values(charts)) chart.repaint(); }
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  localStorage.setItem("warmgate-theme", root.dataset.theme);
  repaint();
});
dark.addEventListener("change", repaint);

/* A page that nobody looks at asks for nothing. */
document.addEventListener("visibilitychange", () => {
  if (document.hidden) { stop.abort(); say("waiting", "Paused"); } else if (!$("lock").open) follow();
});

restore();
follow();
