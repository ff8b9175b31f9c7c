/* The tiles at the top: one number each, what stands behind it, and how it went. */

import { h, svg } from "./dom.js";
import { UNKNOWN, cachedShare, count, dollars, rate, seconds, share } from "./format.js";

export function tiles(data) {
  const { total, before, series, range } = data;
  const elapsed = Math.max(1, Math.min(data.now, range.until) - range.since);
  const requests = series.at.map((_, index) => Object.values(series.requests).reduce((sum, values) => sum + values[index], 0));
  const errors = data.outcomes.find((line) => line.outcome === "error")?.requests ?? 0;
  const partly = (unknown, what) => (unknown ? ` · ${count(unknown)} ${what}` : "");
  const made = [
    tile("Requests", count(total.requests), [`${rate(total.requests / elapsed)} per second`, change(total.requests, before.requests)], requests),
    tile("Hit rate", share(total.hit_rate), [`${share(total.token_hit_rate)} by tokens`, before.requests * 10 < total.requests ? null : points(total.hit_rate, before.hit_rate)], series.hit_rate),
    tile("Tokens saved", count(total.saved_tokens), [`of ${count(total.served_tokens)} served${partly(total.unknown_served, "not counted")}`], series.saved_tokens),
    tile("Cached by providers", count(total.provider_cached_tokens), [behindProvider(total)], series.provider_cached_tokens),
    tile("Money saved", atLeast(total.saved_usd, total.unknown_saved), [data.setup.priced ? `${atLeast(total.cost_usd, total.unknown_cost)} spent` : "no prices configured"], series.saved_usd),
    tile("Median wait", seconds(data.hits.latency_p50), [data.upstream.latency_p50 === null ? "from the cache" : `${seconds(data.upstream.latency_p50)} from upstream`], series.times.latency_hit_p50, data.hits.latency_p50 === null),
    tile("Errors", count(errors), [total.requests ? `${share(errors / total.requests, 2)} of requests` : "of no requests"], series.requests.error),
  ];
  for (const level of data.slo.slice(0, 1)) {
    made.push(tile("Goodput", share(level.met / level.judged), [`${level.model}: ${rate(level.requests_per_second)} requests/s in time`], series.slo_met));
  }
  return made;
}

function tile(name, value, more, line, unknown = value === UNKNOWN) {
  return h("dl", { className: unknown ? "tile unknown" : "tile" }, h("dt", {}, name), h("dd", { className: "big" }, value),
    h("dd", { className: "more" }, more.filter(Boolean).flatMap((part, index) => (index ? [" · ", part] : [part]))), spark(line));
}

function atLeast(value, unknown) { return value === null ? UNKNOWN : `${unknown ? "≥ " : ""}${dollars(value)}`; }

function behindProvider(total) {
  if (total.provider_cached_tokens === null) return "providers did not say";
  if (!total.upstream_prompt_tokens) return "no upstream prompts";
  return `${share(cachedShare(total))} of upstream prompts${total.unsplit_prompt_tokens ? `, ${count(total.unsplit_prompt_tokens)} not told` : ""}`;
}

function change(now, then) {
  if (!then || then * 10 < now) return null; // there was hardly a range before this one
  const by = now / then - 1;
  return `${by >= 0 ? "+" : "−"}${Math.abs(by * 100).toFixed(Math.abs(by) < 0.1 ? 1 : 0)} %`;
}

function points(now, then) {
  if (now === null || then === null || then === undefined) return null;
  const by = (now - then) * 100;
  return h("span", { className: by >= 0 ? "up" : "down", title: "against the range before" }, `${by >= 0 ? "▲" : "▼"} ${Math.abs(by).toFixed(1)} pts`);
}

/* A line without numbers; gaps where nothing is known. */
function spark(values) {
  const width = 200, height = 28;
  const known = values.filter((value) => value !== null);
  const most = Math.max(...known, 0);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  if (known.length < 2 || most === 0) return picture;
  const points = values.map((value, index) => [(index / (values.length - 1)) * width, value === null ? null : height - 2 - (value / most) * (height - 6)]);
  let path = "", open = false;
  for (const [x, y] of points) {
    if (y === null) { open = false; continue; }
    path += `${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    open = true;
  }
  const whole = points.every(([, y]) => y !== null);
  if (whole) picture.append(svg("path", { d: `${path}L${width} ${height}L0 ${height}Z`, fill: "currentColor", "fill-opacity": ".1" }));
  picture.append(svg("path", { d: path, fill: "none", stroke: "currentColor", "stroke-width": "1.5", "vector-effect": "non-scaling-stroke" }));
  return picture;
}
