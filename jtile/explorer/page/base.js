"use strict";
// What all views use: the record, elements, lists of lines of which only those in sight are drawn.

let record = null;

// The record as it stands in the page: JSON, or gzip of it in base 64 where it is long.
async function loaded() {
  const node = document.getElementById("record"), text = node.textContent;
  if (node.type === "application/json") return JSON.parse(text);
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter(child => child != null));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";
function drawn(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter(child => child != null));
  return made;
}

// A text of the record as lines, with the place of each.
function opened(body) {
  if (body.lines) return body;
  body.lines = body.text.split("\n");
  const places = body.of = new Int32Array(body.lines.length);
  let at = 0;
  for (let k = 0; k < body.places.length; k += 2) {
    places.fill(body.places[k], at, at + body.places[k + 1]);
    at += body.places[k + 1];
  }
  body.widest = body.lines.reduce((most, line) => Math.max(most, line.length), 0);
  return body;
}

// One colour a line of source: neighbours are far apart.
const hue = place => (record.places[place][1] * 137.508 + record.places[place][0] * 60) % 360;

const shown = (place, path) => {
  const [source, line] = record.places[place] || [-1, 0];
  return source < 0 ? "" : `${record.sources[source][path ? "path" : "name"]}:${line}`;
};

const TOKENS = /(\/\/.*|;.*|#(?![\w"]).*)|("(?:[^"\\]|\\.)*")|([%$!#@][\w.$-]+)|\b(\d[\w.+]*)\b|\b(for|if|else|while|do|yield|return|kernel|roles?|def|in|lambda|let|import|from|with|as|and|or|not|is|None|True|False|class)\b/g;
// Of Python, where // divides and ; ends a statement.
const PYTHON = new RegExp(TOKENS.source.replace(/^\(.*?\)\|(?=\(")/, "(#.*)|"), "g");
function coloured(line, comments, python) {
  const out = [];
  let at = 0;
  for (const found of line.matchAll(python ? PYTHON : TOKENS)) {
    const kind = found[1] ? comments && "c" : found[2] ? "n" : found[3] ? "v" : found[4] ? "n" : "w";
    if (found[1] && !comments) break;
    if (found.index > at) out.push(line.slice(at, found.index));
    out.push(element("span", { class: kind }, found[0]));
    at = found.index + found[0].length;
  }
  out.push(line.slice(at));
  return out;
}

const ROW = 20;

// A long text: `rows` are {text, place, no, kind}. Only the rows in sight are in the document.
class Lines {
  constructor(label, { onplace, onhold } = {}) {
    this.space = element("div", { class: "space" });
    this.root = element("div", { class: "lines", tabindex: "0", role: "list", "aria-label": label }, this.space);
    this.rows = [];
    this.on = this.held = new Set();
    this.hit = -1;
    this.root.addEventListener("scroll", () => this.draw(), { passive: true });
    const rowOf = event => {
      const row = event.target.closest(".row");
      return row ? this.rows[Number(row.dataset.k)] : null;
    };
    this.root.addEventListener("mouseover", event => onplace && onplace(rowOf(event)?.place || 0));
    this.root.addEventListener("mouseleave", () => onplace && onplace(0));
    this.root.addEventListener("click", event => {
      const row = rowOf(event);
      if (row?.open) row.open();
      else if (row && onhold && !String(getSelection())) onhold(row.place || 0);
    });
    new ResizeObserver(() => this.draw()).observe(this.root);
  }

  set(rows, widest) {
    this.rows = rows;
    this.hit = -1;
    this.space.style.height = `${rows.length * ROW + ROW}px`;
    this.space.style.width = `calc(${widest + 2}ch + 80px)`;
    this.drawn = "";
    this.draw();
  }

  light(on, held) {
    this.on = on;
    this.held = held;
    this.drawn = "";
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.root.scrollTop / ROW) - 8);
    const last = Math.min(this.rows.length, first + Math.ceil(this.root.clientHeight / ROW) + 16);
    const key = `${first} ${last}`;
    if (key === this.drawn) return;
    this.drawn = key;
    const made = [];
    for (let k = first; k < last; k++) made.push(this.row(k));
    this.space.replaceChildren(...made);
  }

  row(k) {
    const { text, place, no, kind, python, comments = true } = this.rows[k];
    const linked = place > 0 && record.places[place][0] >= 0;
    const names = ["row", kind || "", linked ? "linked" : ""];
    if (linked && this.on.has(place)) names.push("on");
    if (linked && this.held.has(place)) names.push("on", "held");
    if (k === this.hit) names.push("hit");
    const made = element("div", { class: names.filter(Boolean).join(" "), role: "listitem", "data-k": k });
    made.style.top = `${k * ROW}px`;
    if (linked) {
      made.style.setProperty("--h", hue(place));
      made.title = shown(place);
    }
    made.append(element("span", { class: "no" }, no == null ? "" : String(no)));
    if (kind === "add" || kind === "del") made.append(element("span", { class: "sign" }, kind === "add" ? "+" : "−"));
    else if (linked) made.append(element("span", { class: "mark" }));
    made.append(...coloured(text, comments, python));
    return made;
  }

  // Bring a row into sight, if it is not.
  reveal(k, always) {
    const top = k * ROW, { scrollTop, clientHeight } = this.root;
    if (always || top < scrollTop || top + ROW > scrollTop + clientHeight)
      this.root.scrollTop = Math.max(0, top - clientHeight / 3);
    this.draw();
  }
}

const rowsOf = body => {
  opened(body);
  return body.lines.map((text, k) => ({ text, place: body.of[k], no: k + 1 }));
};
