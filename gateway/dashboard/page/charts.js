/* Charts over time with uPlot: stacked bars or lines, a legend that hides series, a tooltip, and the same data as a table. */

import { h, table } from "./dom.js";
import { dayOf, moment } from "./format.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const HOUR = 3600;
const powers = (_, splits) => splits.map((value) => (Number.isInteger(Math.round(Math.log10(value) * 1e6) / 1e6) ? value : null));

export class Chart {
  /* series: [{key, label, color (of style.css, without --), dashed}]; format: of values; stacked; log; most: of the y axis */
  constructor(card, { series, format, total = null, stacked = false, log = false, most = null }) {
    Object.assign(this, { card, series, format, total, stacked, log, most, hidden: new Set(), plot: null, shown: null });
    this.box = h("div", { className: "plot", tabIndex: 0, role: "img", on: { keydown: (event) => this.move(event) } });
    this.tip = h("div", { className: "tip", hidden: true });
    this.keys = h("div", { className: "legend", role: "group", "aria-label": "Series" });
    this.table = h("div", { className: "scroll as-table", tabIndex: 0, role: "group", hidden: true, "aria-label": `${this.title}, as a table` });
    this.asTable = h("button", { type: "button", className: "quiet", "aria-pressed": "false", on: { click: () => this.toggleTable() } }, "Table");
    card.querySelector("header").append(h("span", { className: "acts" }, this.asTable));
    card.append(this.box, this.table, this.keys);
    this.sized = new ResizeObserver(() => this.plot?.setSize(this.size()));
    this.sized.observe(this.box);
    this.buildKeys();
  }

  get title() { return this.card.querySelector("h2").textContent; }

  size() { return { width: Math.max(60, this.box.clientWidth), height: this.box.clientHeight || 210 }; }

  /* at: moments (unix seconds); columns: {key: values}; step: seconds that each value covers */
  set(at, columns, step) {
    this.shown = { at, columns, step };
    const data = this.data();
    if (this.plot && this.plotted === this.signature()) this.plot.setData(data);
    else this.build(data);
    this.describe();
    if (!this.table.hidden) this.fillTable();
  }

  /* After a change of theme: colours are read anew. */
  repaint() {
    this.plot?.destroy();
    this.plot = null;
    if (this.shown) this.set(this.shown.at, this.shown.columns, this.shown.step);
  }

  visible() { return this.series.filter((s) => !this.hidden.has(s.key)); }

  signature() { return this.visible().map((s) => s.key).join() + this.shown.step; }

  /* uPlot draws in order, so of a stack the highest comes first and the lower ones cover it. */
  data() {
    const { at, columns } = this.shown;
    const visible = this.visible();
    if (!this.stacked) return [at, ...visible.map((s) => columns[s.key])];
    const sum = new Array(at.length).fill(0);
    const layers = visible.map((s) => columns[s.key].map((value, index) => (sum[index] += value ?? 0)));
    return [at, ...layers.reverse()];
  }

  build(data) {
    this.plot?.destroy();
    this.plotted = this.signature();
    const order = this.stacked ? [...this.visible()].reverse() : this.visible();
    const long = this.shown.step >= HOUR;
    const bars = uPlot.paths.bars({ size: [0.82, 40], align: 1, radius: 0.06 });
    const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.plot = new uPlot({
      ...this.size(),
      legend: { show: false },
      cursor: { y: false, points: { show: !this.stacked, size: 6 }, drag: { x: false, y: false }, sync: { key: "warmgate" } },
      scales: {
        x: { time: true, range: () => [this.shown.at[0], this.shown.at.at(-1) + (this.stacked ? this.shown.step : 0)] },
        y: this.log ? { distr: 3 } : { range: (_, low, high) => [0, this.most ?? Math.max(high * 1.08, 1e-9)] },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 26, space: 64, values: (_, splits) => splits.map((at) => (long && new Date(at * 1000).getHours() === 0 ? dayOf(at) : moment(at).slice(-5))) },
        { ...axis, ...(this.log ? { filter: powers, grid: { ...axis.grid, filter: powers } } : {}), size: 52, values: (_, splits) => splits.map((value) => (value === null ? "" : this.format(value))) },
      ],
      series: [{}, ...order.map((s) => ({
        label: s.label, stroke: css(`--${s.color}`), width: this.stacked ? 0 : 1.75,
        ...(this.stacked ? { fill: css(`--${s.color}`), paths: bars } : { dash: s.dashed ? [4, 4] : undefined, spanGaps: false }),
        points: { show: this.stacked ? false : (plot, index) => this.isLone(plot.data[index]), size: 5 },
      }))],
      hooks: { setCursor: [(plot) => this.point(plot)] },
    }, data, this.box);
    this.box.append(this.tip);
  }

  /* A line of single values between gaps would not be seen at all. */
  isLone(values) { return values.some((v, i) => v !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null); }

  point(plot) {
    const { idx, left } = plot.cursor;
    const own = this.box.matches(":hover") || this.box === document.activeElement;
    this.tip.hidden = idx === null || idx === undefined || left < 0 || !own;
    if (this.tip.hidden) return;
    const { at, columns } = this.shown;
    const rows = this.visible().filter((s) => !this.stacked || columns[s.key][idx]).map((s) => h("span", {}, this.dot(s), s.label, h("b", {}, this.text(columns[s.key][idx]))));
    this.tip.replaceChildren(h("strong", {}, moment(at[idx])), ...rows);
    const x = plot.valToPos(at[idx], "x") + plot.bbox.left / devicePixelRatio;
    const flip = x > this.box.clientWidth / 2;
    this.tip.style.left = flip ? "" : `${x + 14}px`;
    this.tip.style.right = flip ? `${this.box.clientWidth - x + 14}px` : "";
    this.tip.style.top = "6px";
  }

  move(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.plot) return;
    event.preventDefault();
    const last = this.shown.at.length - 1;
    const index = Math.max(0, Math.min(last, (this.plot.cursor.idx ?? (by > 0 ? -1 : last + 1)) + by));
    this.plot.setCursor({ left: this.plot.valToPos(this.shown.at[index], "x"), top: 10 });
  }

  text(value) { return value === null || value === undefined ? "–" : this.format(value); }

  dot(s) {
    const kind = this.stacked ? "" : s.dashed ? " dashed" : " line";
    return h("i", { className: `dot${kind} k-${s.color}`, "aria-hidden": "true" });
  }

  buildKeys() {
    this.keys.replaceChildren(...this.series.map((s) => h("button", {
      type: "button", "aria-pressed": String(!this.hidden.has(s.key)), on: { click: (event) => this.toggle(s, event.currentTarget) },
    }, this.dot(s), s.label, h("b", { "data-key": s.key }))));
  }

  toggle(s, button) {
    if (this.hidden.has(s.key)) this.hidden.delete(s.key); else this.hidden.add(s.key);
    button.setAttribute("aria-pressed", String(!this.hidden.has(s.key)));
    if (this.shown) this.set(this.shown.at, this.shown.columns, this.shown.step);
  }

  toggleTable() {
    const on = this.table.hidden;
    this.asTable.setAttribute("aria-pressed", String(on));
    this.table.hidden = !on;
    this.box.hidden = on;
    if (on) this.fillTable(); else this.plot?.setSize(this.size());
  }

  fillTable() {
    const { at, columns } = this.shown;
    const rows = at.map((_, index) => index).reverse();
    this.table.replaceChildren(table(this.title, [
      { label: "Time", cell: (index) => moment(at[index]) },
      ...this.series.map((s) => ({ label: s.label, cell: (index) => this.text(columns[s.key][index]) })),
    ], rows));
  }

  /* The legend's numbers, and what a screen reader is told of the picture. */
  describe() {
    const said = [];
    for (const s of this.series) {
      const values = this.shown.columns[s.key].filter((value) => value !== null && value !== undefined);
      const value = values.length === 0 ? null : this.total === "sum" ? values.reduce((a, b) => a + b, 0) : values.at(-1);
      const text = this.text(value);
      this.keys.querySelector(`[data-key="${s.key}"]`).textContent = text;
      said.push(`${s.label} ${text}`);
    }
    this.box.setAttribute("aria-label", `${this.title}. ${this.total === "sum" ? "In this range" : "At the end of this range"}: ${said.join(", ")}. Use the arrow keys to read it step by step, or the table.`);
  }
}
