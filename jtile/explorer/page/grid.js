"use strict";
// The grid as a picture: which program reads and writes which part of each array.

// The accesses of a program, in order: {op, round, masked, box: [[start, size], ...]}.
function eventsOf(access, k) {
  const numbers = access.events[k], out = [];
  for (let at = 0; at < numbers.length;) {
    const op = numbers[at], rank = access.accesses[op].dims.length, box = [];
    for (let d = 0; d < rank; d++) box.push([numbers[at + 3 + 2 * d], numbers[at + 4 + 2 * d]]);
    out.push({ op, round: numbers[at + 1], masked: numbers[at + 2], box });
    at += 3 + 2 * rank;
  }
  return out;
}

const COLOURS = { read: "--read", write: "--write", atomic: "--both" };
const token = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const pidOf = (shape, linear) => {
  const out = [];
  for (let k = shape.length - 1; k >= 0; k--) {
    out.unshift(linear % shape[k]);
    linear = Math.floor(linear / shape[k]);
  }
  return out;
};
const span = ([start, size]) => (size === 1 ? `${start}` : `${start}:${start + size}`);

// The two dimensions of an array in which what is touched is largest; the last ones of those that are alike.
function widestAxes(rank, number, access, all) {
  const most = new Array(rank).fill(0);
  for (const one of all) if (access.accesses[one.op].ref === number)
    one.box.forEach(([, size], d) => { most[d] = Math.max(most[d], size); });
  const order = [...most.keys()].sort((a, b) => most[b] - most[a] || b - a);
  return order.slice(0, 2).sort((a, b) => a - b);
}

// One array: two of its dimensions as a rectangle, the others as the plane that is shown.
class ArrayPicture {
  constructor(ref, number, access, all) {
    this.ref = ref;
    this.number = number;
    this.access = access;
    this.all = all;
    this.axes = widestAxes(ref.shape.length, number, access, all);
    [this.rows, this.columns] = [1, 1, ...this.axes.map(axis => ref.shape[axis])].slice(-2);
    this.canvas = element("canvas", { role: "img", "aria-label": `Accesses of ${ref.name}` });
    this.plane = element("span", { class: "muted small" });
    const kinds = new Set(access.accesses.filter(one => one.ref === number).map(one => one.kind));
    this.root = element("figure", { class: "array" },
      element("figcaption", {}, element("b", {}, ref.name), ` ${ref.dtype}[${ref.shape.join(", ")}] `,
        [...kinds].map(kind => element("span", { class: `tag ${kind}` }, kind)), " ", this.plane),
      this.canvas);
  }

  // Of a box, where it is in the rectangle, and where it is along the other dimensions.
  flat(box) {
    const lead = box.map((part, d) => (this.axes.includes(d) ? null : part));
    const [r, c] = [[0, 1], [0, 1], ...this.axes.map(axis => box[axis])].slice(-2);
    return { lead, r, c };
  }

  draw(events, round) {
    const wide = Math.min(276, (this.root.parentElement?.clientWidth || 380) - 34);
    const ratio = Math.min(Math.max(this.rows / this.columns, 0.12), 1.1);
    const margin = 14, w = Math.max(wide - 2 * margin, 60);
    const h = this.ref.shape.length < 2 ? 26 : Math.max(w * ratio, 30);
    const scale = devicePixelRatio || 1, context = this.canvas.getContext("2d");
    this.canvas.width = (w + 2 * margin) * scale;
    this.canvas.height = (h + 2 * margin) * scale;
    this.canvas.style.width = `${w + 2 * margin}px`;
    this.canvas.style.height = `${h + 2 * margin}px`;
    context.scale(scale, scale);
    context.translate(margin, margin);
    const mine = events.filter(one => this.access.accesses[one.op].ref === this.number);
    const now = mine.filter(one => one.round === round || one.round < 0);
    const shown = this.flat((now[0] || mine[0] || { box: this.ref.shape.map(() => [0, 1]) }).box);
    const at = shown.lead.map(part => (part ? part[0] : ":"));
    this.plane.textContent = at.length > 2 ? `plane [${at.join(", ")}]` : "";
    const here = ({ lead }) => lead.every((part, d) => !part || (part[0] <= at[d] && at[d] < part[0] + part[1]));
    const x = c => c / this.columns * w, y = r => r / this.rows * h;
    context.fillStyle = token("--sunk");
    context.fillRect(0, 0, w, h);
    const box = (one, alpha, edge) => {
      const place = this.flat(one.box), access = this.access.accesses[one.op];
      if (!here(place)) return;
      const [r0, rn] = place.r, [c0, cn] = place.c, colour = token(COLOURS[access.kind]);
      const left = x(c0), top = y(r0), width = Math.max(x(cn), 1), height = Math.max(y(rn), 1);
      context.save();
      context.beginPath();
      context.rect(-margin, -margin, w + 2 * margin, h + 2 * margin);
      context.clip();
      context.globalAlpha = alpha;
      context.fillStyle = colour;
      const inside = [Math.max(left, 0), Math.max(top, 0), Math.min(left + width, w), Math.min(top + height, h)];
      if (inside[2] > inside[0] && inside[3] > inside[1])
        context.fillRect(inside[0], inside[1], inside[2] - inside[0], inside[3] - inside[1]);
      if (edge) {
        context.globalAlpha = 1;
        context.strokeStyle = colour;
        context.setLineDash(access.dims.some(dim => dim.kind === "take") ? [3, 3] : []);
        context.lineWidth = 1.5;
        context.strokeRect(left, top, width, height);
        if (one.masked) hatch(context, left, top, width, height, colour);
        const over = [[w, top, left + width - w, height], [left, h, width, top + height - h]];
        for (const [ox, oy, ow, oh] of over) if (ow > 0.5 && oh > 0.5) hatch(context, ox, oy, ow, oh, colour);
      }
      context.restore();
    };
    const tint = Math.max(0.05, Math.min(0.3, 3 / Math.sqrt(this.all.length)));
    for (const one of this.all) if (this.access.accesses[one.op].ref === this.number) box(one, tint * 0.5, false);
    for (const one of mine) box(one, 0.18, false);
    for (const one of now) box(one, 0.6, true);
    context.globalAlpha = 1;
    context.strokeStyle = token("--faint");
    context.lineWidth = 1;
    context.strokeRect(0, 0, w, h);
  }
}

function hatch(context, x, y, w, h, colour) {
  context.save();
  context.beginPath();
  context.rect(x, y, Math.max(w, 2), Math.max(h, 2));
  context.clip();
  context.strokeStyle = colour;
  context.globalAlpha = 0.7;
  context.lineWidth = 1;
  context.setLineDash([]);
  for (let k = -h; k < w + h; k += 5) {
    context.beginPath();
    context.moveTo(x + k, y + h);
    context.lineTo(x + k + h, y);
    context.stroke();
  }
  context.restore();
}

// The programs of a grid: its last two axes as cells, the others as the plane that the program is in. Where that is
// many or long, a cell stands for several programs.
class GridPicture {
  constructor(access, onchoose) {
    this.access = access;
    this.place = new Map(access.programs.map((program, k) => [program, k]));
    this.canvas = element("canvas", { role: "img", "aria-label": "Programs of the grid", class: "cells" });
    this.canvas.addEventListener("click", event => {
      const bounds = this.canvas.getBoundingClientRect();
      const [i, j] = [(event.clientY - bounds.top) / this.cell, (event.clientX - bounds.left) / this.cell].map(Math.floor);
      const linear = this.first + (i * this.columns + j) * this.each;
      const known = access.programs.reduce((best, one) => Math.abs(one - linear) < Math.abs(best - linear) ? one : best);
      onchoose(this.place.get(known));
    });
  }

  draw(k) {
    const { shape, programs } = this.access, program = programs[k];
    const long = shape.filter(size => size > 1);
    let [rows, columns] = [1, 1, ...long].slice(-2);
    const plane = columns * rows;
    this.first = Math.floor(program / plane) * plane;
    this.each = 1;
    if (Math.max(rows, columns) > 150 || (rows === 1 && columns > 32)) { // rows of programs in their order
      this.each = Math.ceil(plane / (150 * 75));
      columns = Math.ceil(Math.sqrt(plane / this.each * 2));
      rows = Math.ceil(plane / this.each / columns);
    }
    this.columns = columns;
    this.cell = Math.max(2, Math.min(22, Math.floor(300 / Math.max(columns, rows))));
    const scale = devicePixelRatio || 1, context = this.canvas.getContext("2d");
    this.canvas.width = columns * this.cell * scale;
    this.canvas.height = rows * this.cell * scale;
    this.canvas.style.width = `${columns * this.cell}px`;
    this.canvas.style.height = `${rows * this.cell}px`;
    context.scale(scale, scale);
    const gap = this.cell > 5 ? 2 : this.cell > 3 ? 1 : 0;
    for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) {
      const linear = this.first + (i * columns + j) * this.each;
      if (linear >= this.first + plane) break;
      const here = linear <= program && program < linear + this.each;
      const known = this.each > 1 || this.place.has(linear);
      context.fillStyle = token(here ? "--warm" : known ? "--accent" : "--line");
      context.globalAlpha = here ? 1 : known ? 0.45 : 0.8;
      context.fillRect(j * this.cell, i * this.cell, this.cell - gap, this.cell - gap);
    }
  }
}

views.grid = {
  title: "Grid",
  about: "Which program reads and writes which part of each array.",
  has: piece => Boolean(piece.access?.accesses.length),
  show(main, piece) {
    const access = piece.access;
    const whole = access.programs.map((_, k) => eventsOf(access, k));
    const all = whole.flat().length > 6000 ? whole.flat().filter((_, k, list) => k % Math.ceil(list.length / 6000) === 0) : whole.flat();
    const used = [...new Set(access.accesses.map(one => one.ref))].sort((a, b) => a - b);
    const pictures = used.map(number => new ArrayPicture(piece.refs[number], number, access, all));
    const cells = new GridPicture(access, k => choose(k, 0));
    const program = element("input", { type: "range", min: 0, max: access.programs.length - 1, "aria-label": "Program" });
    const rounds = element("input", { type: "range", min: 0, "aria-label": "Round of the loop" });
    const who = element("b"), what = element("b"), list = element("ul", { class: "events" });
    const roundRow = element("div", { class: "control" });
    let k = 0, round = 0, times = [0], timer = null, sweep = "rounds";
    const draw = () => {
      const events = whole[k];
      cells.draw(k);
      for (const picture of pictures) picture.draw(events, times[round]);
      who.textContent = access.shape.length ? `(${pidOf(access.shape, access.programs[k]).join(", ")})` : "the only one";
      what.textContent = `${round + 1} of ${times.length}`;
      program.value = k;
      rounds.value = round;
      list.replaceChildren(...events.filter(one => one.round === times[round] || one.round < 0).slice(0, 40).map(one => {
        const { ref, kind, place, dims } = access.accesses[one.op], array = piece.refs[ref];
        const over = one.box.some(([start, size], d) => start + size > array.shape[d] || start < 0);
        const gather = dims.some(dim => dim.kind === "take");
        return element("li", { class: kind },
          element("span", { class: "mono" }, `${array.name}[${one.box.map(span).join(", ")}]`), " ", kind,
          gather ? ", gathered from between" : "", over ? ", hangs over the end" : "",
          one.masked ? `, ${one.masked.toLocaleString("en")} lanes masked` : "",
          place ? element("span", { class: "muted" }, ` · ${shown(place)}`) : "");
      }));
    };
    const choose = (next, at = round) => {
      k = (next + whole.length) % whole.length;
      times = [...new Set(whole[k].map(one => one.round))];
      if (!times.length) times = [0];
      round = Math.min(Math.max(at, 0), times.length - 1);
      rounds.max = times.length - 1;
      roundRow.hidden = times.length < 2;
      state.program = k;
      state.round = round;
      draw();
      keep();
    };
    const step = by => (sweep === "rounds" && times.length > 1 ? choose(k, (round + by + times.length) % times.length) : choose(k + by, 0));
    const play = element("button", { type: "button", onclick: () => toggle() }, "▶ Play");
    const toggle = on => {
      const running = on ?? !timer;
      clearInterval(timer);
      timer = running ? setInterval(() => {
        if (round + 1 < times.length) choose(k, round + 1);
        else choose(k + 1, 0);
      }, 380) : null;
      play.textContent = running ? "⏸ Stop" : "▶ Play";
    };
    program.addEventListener("input", () => { sweep = "programs"; choose(Number(program.value), 0); });
    rounds.addEventListener("input", () => { sweep = "rounds"; choose(k, Number(rounds.value)); });
    roundRow.append(element("label", {}, "Round "), what, rounds);
    const size = access.shape.length ? access.shape.join(" × ") : "1";
    main.append(element("div", { class: "sheet" }, element("div", { class: "gridview" },
      element("section", { class: "card side" },
        element("h2", {}, `Grid of ${size} programs`), cells.canvas,
        element("div", { class: "control" }, element("label", {}, "Program "), who, program), roundRow,
        element("div", { class: "control" }, play),
        list, access.notes.map(note => element("p", { class: "muted small" }, note)),
        element("p", { class: "muted small legend" },
          element("span", { class: "tag read" }, "read"), element("span", { class: "tag write" }, "write"),
          element("span", { class: "tag atomic" }, "atomic"),
          " Strong: this round. Light: all of this program, fainter: all programs. Hatched: lanes beyond the end, or masked.")),
      element("section", { class: "arrays" }, pictures.map(one => one.root)))));
    choose(state.program || 0, state.round || 0);
    const resized = new ResizeObserver(() => draw());
    resized.observe(main.firstChild);
    return { ArrowRight: () => step(1), ArrowLeft: () => step(-1), j: () => choose(k + 1, 0), k: () => choose(k - 1, 0),
      " ": () => toggle(), stop: () => { toggle(false); resized.disconnect(); } };
  },
};
