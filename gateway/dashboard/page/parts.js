/* Everything below the charts: tables, tiers, reasons. */

import { h, mark, meter, table } from "./dom.js";
import { UNKNOWN, bytes, cachedShare, count, dollars, exact, moment, rate, seconds, share } from "./format.js";

export const OUTCOMES = { exact: "Exact", semantic: "Semantic", faq: "Curated", stale: "Stale", coalesced: "Coalesced", miss: "Miss", bypass: "Bypass", error: "Error" };

const named = (value, none = "(none)") => (value === "" ? h("span", { className: "faint" }, none) : value);
const money = (value, unknown) => (value === null ? UNKNOWN : `${unknown ? "≥ " : ""}${dollars(value)}`);

export function outcomes(data) {
  const all = data.total.requests;
  const lines = Object.keys(OUTCOMES).map((name) => data.outcomes.find((line) => line.outcome === name)).filter((line) => line && (line.requests || line.calls));
  const stream = (name, streamed) => data.speed.find((line) => line.outcome === name && Boolean(line.stream) === streamed);
  return table("Requests by outcome", [
    { label: "Outcome", cell: (l) => mark(l.outcome, OUTCOMES[l.outcome]) },
    { label: "Requests", cell: (l) => exact(l.requests) },
    { label: "Share", cell: (l) => h("span", {}, share(all ? l.requests / all : null), meter(l.requests / all, `k-${l.outcome}`)) },
    { label: "Tokens served", cell: (l) => count(l.served_tokens) },
    { label: "TTFT p50", cell: (l) => seconds(l.ttft_p50) },
    { label: "p95", cell: (l) => seconds(l.ttft_p95) },
    { label: "Latency p50", cell: (l) => seconds(l.latency_p50) },
    { label: "p95", cell: (l) => seconds(l.latency_p95) },
    { label: "Streamed", className: "wideonly", cell: (l) => count(stream(l.outcome, true)?.requests ?? 0) },
  ], lines);
}

export function models(data) { return byName(data.models, "model", "Model", "(no model)"); }
export function tenants(data) { return byName(data.tenants, "tenant", "Tenant", "(not let in)"); }

function byName(lines, part, label, none) {
  return table(`Requests by ${part}`, [
    { label, className: "name", cell: (l) => named(l[part], none) },
    { label: "Requests", cell: (l) => exact(l.requests) },
    { label: "Hit rate", cell: (l) => h("span", {}, share(l.hit_rate), meter(l.hit_rate, "k-exact")) },
    { label: "By tokens", cell: (l) => share(l.token_hit_rate) },
    { label: "Tokens saved", cell: (l) => count(l.saved_tokens) },
    { label: "Provider-cached", className: "wideonly", cell: (l) => count(l.provider_cached_tokens) },
    { label: "Upstream tokens", className: "wideonly", cell: (l) => count(l.upstream_tokens) },
    { label: "Spent", cell: (l) => money(l.cost_usd, l.unknown_cost) },
    { label: "Saved", cell: (l) => money(l.saved_usd, l.unknown_saved) },
    { label: "Latency p95", cell: (l) => seconds(l.latency_p95) },
  ], lines.filter((line) => line.requests || line.calls));
}

export function upstreams(data) {
  const busiest = Math.max(1, ...data.upstreams.map((u) => u.in_flight));
  return table("Upstreams", [
    { label: "Upstream", className: "name", cell: (u) => u.name, text: true },
    { label: "Under way", cell: (u) => h("span", {}, exact(u.in_flight), meter(u.in_flight / busiest)) },
    { label: "Calls", cell: (u) => exact(u.calls) },
    { label: "Prompt tokens", cell: (u) => count(u.upstream_prompt_tokens) },
    { label: "Cached there", cell: (u) => (u.provider_cached_tokens === null ? UNKNOWN : share(cachedShare(u))) },
    { label: "Output tokens", cell: (u) => count(u.upstream_output_tokens) },
    { label: "Spent", cell: (u) => money(u.cost_usd, u.unknown_cost) },
    { label: "Models", text: true, className: "why wideonly", cell: (u) => u.models.join(", ") },
  ], data.upstreams, "No upstream is configured.");
}

export function tiers(data) {
  const { memory, store, flights, problems } = data.tiers;
  const facts = [];
  if (memory) {
    facts.push(fact("Memory", `${bytes(memory.bytes)} of ${bytes(memory.max_bytes)}`, meter(memory.bytes / memory.max_bytes),
      `${count(memory.entries)} ${memory.entries === 1 ? "answer" : "answers"} · ${count(memory.evictions)} evicted${data.workers > 1 ? ` · ${data.workers} workers` : ""}`));
  } else facts.push(fact("Memory", "off"));
  if (store) {
    const { ok = 0, miss = 0, ...failed } = store.calls.get ?? {};
    const lost = Object.entries(failed).filter(([, n]) => n).map(([name, n]) => `${count(n)} ${name.replace("error:", "")}`);
    const state = { closed: ["good", "healthy"], "half-open": ["warn", "probing"], open: ["bad", "circuit open"] }[store.circuit];
    facts.push(fact(store.name === "redis" ? "Redis" : "Disk", h("span", { className: `badge ${state[0]}` }, state[1]), null,
      `${count(ok)} found · ${count(miss)} not there${lost.length ? ` · ${lost.join(" · ")}` : ""}`));
  } else facts.push(fact("Disk and Redis", "off"));
  facts.push(fact("Calls under way that others may join", exact(flights)));
  facts.push(fact("Ledger", problems.length ? h("span", { className: "badge bad" }, "not written") : h("span", { className: "badge good" }, data.ledger.shared ? "written" : "in memory"), null, problems.join(" · ")));
  return h("div", { className: "facts" }, facts);
}

function fact(name, value, bar = null, more = "") {
  return h("div", {}, h("div", { className: "row" }, h("span", {}, name), h("span", {}, value)), bar, more ? h("span", { className: "sub" }, more) : null);
}

/* Red ones with what to do about them, then all others as a row of lights. */
export function sentinels({ sentinels: { lights, at } }) {
  if (at === null) return h("p", { className: "none" }, "No round has been made yet.");
  const red = lights.filter((l) => l.state === "red");
  return h("div", {}, red.length ? h("ul", { className: "alarms" }, red.map((l) => h("li", {},
    h("span", { className: "badge bad" }, "red"), h("strong", {}, lightName(l)), h("span", {}, l.cause),
    h("span", { className: "sub" }, `since ${moment(l.since)}`, l.setting ? " · look at " : null, l.setting ? h("code", {}, l.setting) : null)))) : null,
  h("ul", { className: "lights" }, lights.filter((l) => l.state !== "red").map((l) => h("li", { title: l.state === "green" ? l.means : l.cause },
    h("i", { className: `light ${l.state}`, "aria-hidden": "true" }), lightName(l), h("span", { className: "unseen" }, l.state === "green" ? ": works" : `: ${l.cause}`)))));
}

export function sentinelsNote({ sentinels: { every, at, cost } }) {
  const { requests, prompt } = cost.per_hour;
  const spent = requests ? `costs upstreams ${count(requests)} requests and ${count(prompt)} prompt tokens an hour, in no other figure` : "costs upstreams nothing";
  return `a round every ${seconds(every)}${at === null ? "" : `, the last at ${moment(at, true)}`} · ${spent}`;
}

export function lightName(l) { return [l.name, l.upstream, l.tier].filter(Boolean).join(" "); }

export function reasons(data) { return bars(data.reasons, (r) => [mark(r.outcome, r.reason), r.count, `k-${r.outcome}`], "Everything could be cached."); }
export function questions(data) { return bars(data.questions, (q) => [h("span", {}, q.prompt), q.count, ""], ""); }

function bars(lines, read, none) {
  if (lines.length === 0) return h("p", { className: "none" }, none);
  const most = Math.max(...lines.map((line) => line.count));
  return h("ul", { className: "bars" }, lines.map((line) => {
    const [name, number, kind] = read(line);
    name.title = line.reason ?? line.prompt;
    return h("li", {}, name, h("span", {}, exact(number)), meter(number / most, kind));
  }));
}

export function goodput(data) {
  return table("Goodput", [
    { label: "Model", className: "name", cell: (l) => l.model },
    { label: "In time", cell: (l) => share(l.met / l.judged) },
    { label: "Requests/s", cell: (l) => rate(l.requests_per_second) },
    { label: "Tokens/s", cell: (l) => rate(l.tokens_per_second) },
  ], data.slo);
}

/* What hits save, as measured on those that were sent upstream all the same. */
export function savings(data) {
  const { held_out, hits, judged, agreement, per_hit, in_all } = data.savings;
  const between = (each, format) => (each ? h("span", {}, format(each.value), h("span", { className: "sub" }, ` (${format(each.low)} to ${format(each.high)})`)) : "not enough yet");
  const lines = [["Time", per_hit.seconds, in_all.seconds, seconds], ["Tokens", per_hit.tokens, in_all.tokens, count], ["Money", per_hit.usd, in_all.usd, dollars]];
  const differs = agreement && agreement.high < 0.95;
  return h("div", {}, table("Savings with 95 % confidence intervals", [
    { label: "", cell: (l) => l[0] },
    { label: "A hit saves", cell: (l) => between(l[1], l[3]) },
    { label: `All ${count(hits)} exact hits saved`, cell: (l) => between(l[2], l[3]) },
  ], lines), h("p", { className: "sub" }, `${count(held_out)} hits were sent upstream all the same, to measure. `,
    agreement ? h("span", { className: differs ? "badge bad" : "" }, `Of ${count(judged)} answers, ${share(agreement.value)} agreed with the kept one (${share(agreement.low)} to ${share(agreement.high)}).`) : null));
}

export function recent(data) {
  const many = data.viewer.tenant === null && data.choices.tenants.length > 1;
  return table("Recent requests, the newest first", [
    { label: "Ended", cell: (r) => moment(r.ended, true) },
    { label: "Outcome", text: true, cell: (r) => mark(r.outcome, OUTCOMES[r.outcome]) },
    { label: "Status", cell: (r) => h("span", { className: r.status >= 400 ? "badge bad" : "" }, r.status) },
    { label: "Model", text: true, className: "name", cell: (r) => named(r.model, "(no model)"), title: (r) => r.model },
    ...(many ? [{ label: "Tenant", text: true, className: "name wideonly", cell: (r) => named(r.tenant) }] : []),
    { label: "Endpoint", text: true, className: "wideonly faint", cell: (r) => r.endpoint.replace("/v1/", "") + (r.stream ? " · stream" : "") },
    { label: "Upstream", text: true, className: "wideonly faint", cell: (r) => r.upstream },
    { label: "Prompt", cell: (r) => exact(r.prompt_tokens) },
    { label: "cached", className: "wideonly", cell: (r) => (r.prompt_tokens === null ? "" : exact(r.cached_tokens)) },
    { label: "Output", cell: (r) => exact(r.output_tokens) },
    { label: "TTFT", cell: (r) => seconds(r.ttft) },
    { label: "Latency", cell: (r) => seconds(r.latency) },
    { label: "Reason", text: true, className: "why", cell: (r) => r.reason, title: (r) => r.reason },
    { label: "Request id", text: true, className: "mono faint wideonly", cell: (r) => r.request_id.slice(0, 12), title: (r) => r.request_id },
  ], data.recent);
}
