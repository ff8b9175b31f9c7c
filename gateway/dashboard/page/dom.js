/* Elements from plain values. Text is only ever set as text: whatever a model or a tenant is called, it cannot act. */

export function h(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (name in made && name !== "role") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined).map(asNode));
  return made;
}

function asNode(child) { return child instanceof Node ? child : String(child); }

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/* A table. columns: [{label, cell(row), text, className}]; the first column names its row. */
export function table(caption, columns, rows, none = "Nothing in this range.") {
  if (rows.length === 0) return h("p", { className: "none" }, none);
  const head = columns.map((c) => h("th", { scope: "col", className: classes(c) }, c.label));
  const body = rows.map((row) => h("tr", {}, columns.map((c, index) => h(
    index === 0 ? "th" : "td", index === 0 ? { scope: "row", className: classes(c) } : { className: classes(c), title: c.title?.(row) }, c.cell(row),
  ))));
  return h("table", {}, h("caption", { className: "unseen" }, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body));
}

function classes(column) { return [column.text ? "text" : "", column.className ?? ""].join(" ").trim(); }

/* A bar that shows a share; the number stands beside it, so it is only decoration. */
export function meter(share, kind = "") {
  const fill = h("i", { className: kind });
  fill.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return h("span", { className: "meter", "aria-hidden": "true" }, fill);
}

export function mark(kind, label = kind) {
  return h("span", { className: "mark" }, h("i", { className: `dot k-${kind}`, "aria-hidden": "true" }), label);
}

export function show(element, visible) { element.hidden = !visible; }
