"use strict";
// Where elements are: the threads of a tile, the banks of a buffer, the wavefronts of an access; a CPU's vector registers.

const LINES_SHOWN = 64, BANKS = 32;
const bitsOf = n => Math.max(Math.round(Math.log2(Math.max(n, 1))), 0);
const shapeText = (dtype, shape) => `${dtype}[${shape.join(", ")}]`;
const tinted = (hue, light = 72) => `hsl(${hue % 360} 62% ${light}%)`;

// The columns of a picture: the last axis; a tile of one axis is broken into lines.
const columnsOf = shape => (shape.length > 1 ? shape[shape.length - 1] : Math.min(shape[0], 64));
const sizeOf = shape => shape.reduce((all, n) => all * n, 1);

// All sums (XOR) of steps of powers of two, in the order of the number whose bits choose the steps.
function sums(steps) {
  let out = Int32Array.of(0);
  for (const step of steps) {
    const more = new Int32Array(out.length * 2);
    more.set(out);
    out.forEach((value, k) => { more[out.length + k] = value ^ step; });
    out = more;
  }
  return out;
}

// Of each element of a tile: the number of its thread in a warp, its warp and its register; and how many hold it.
function holders(tile) {
  const strides = tile.shape.map((_, k) => sizeOf(tile.shape.slice(k + 1)));
  const flat = bases => sums(bases.map(base => base.reduce((all, x, k) => all + x * strides[k], 0)));
  const [registers, lanes, warps] = [flat(tile.register), flat(tile.lane), flat(tile.warp)], size = sizeOf(tile.shape);
  const found = { lane: new Int16Array(size).fill(-1), warp: new Int16Array(size), register: new Int32Array(size), copies: new Int16Array(size) };
  warps.forEach((w, i) => lanes.forEach((l, j) => registers.forEach((r, k) => {
    const at = w ^ l ^ r;
    found.copies[at]++;
    if (found.lane[at] >= 0) return;
    found.lane[at] = j; found.warp[at] = i; found.register[at] = k;
  })));
  return { ...found, registers: registers.length, lanes: lanes.length, warps: warps.length };
}

// The byte at which each element of a buffer begins.
function bytesOf(buffer) {
  const axes = buffer.along.map(bits => sums(bits));
  const out = new Int32Array(sizeOf(buffer.shape));
  for (let at = 0; at < out.length; at++) {
    let rest = at, place = 0;
    for (let axis = axes.length - 1; axis >= 0; axis--) {
      place ^= axes[axis][rest % buffer.shape[axis]];
      rest = Math.floor(rest / buffer.shape[axis]);
    }
    for (const [every, more] of buffer.pads) place += Math.floor(place / every) * more;
    out[at] = place * buffer.bits / 8;
  }
  return out;
}

// A picture of cells: `fill(r, c)` gives a colour or null, `label(r, c)` a text for large cells.
class Cells {
  constructor(label, rows, columns, { fill, name, say, most = 22 }) {
    Object.assign(this, { rows: Math.min(rows, LINES_SHOWN), columns, fill, name, say, marked: () => false });
    this.all = rows;
    const wide = Math.max(Math.min(document.getElementById("main").clientWidth - 70, 1040), 200);
    this.cell = Math.max(Math.min(Math.floor(wide / columns), most), 3);
    this.columns = Math.min(columns, Math.floor(wide / this.cell));
    this.canvas = element("canvas", { role: "img", "aria-label": label, class: "cellmap" });
    const shown = [this.rows < rows ? `the first ${this.rows} of ${rows} rows` : "", this.columns < columns ? `the first ${this.columns} of ${columns} columns` : ""];
    const left = shown.filter(Boolean).join(", ");
    this.root = element("div", {}, element("div", { class: "scroll" }, this.canvas), left ? element("p", { class: "muted small" }, `Shown: ${left}.`) : null);
    this.canvas.addEventListener("mousemove", event => this.over(event));
    this.canvas.addEventListener("mouseleave", () => { this.mark(() => false); say("", ""); });
  }

  over(event) {
    const box = this.canvas.getBoundingClientRect();
    const [r, c] = [Math.floor((event.clientY - box.top) / this.cell), Math.floor((event.clientX - box.left) / this.cell)];
    if (r >= 0 && c >= 0 && r < this.rows && c < this.columns) this.say(r, c);
  }

  mark(marked) { this.marked = marked; this.draw(); }

  draw() {
    const ratio = devicePixelRatio || 1, { cell, canvas } = this, [w, h] = [this.columns * cell, this.rows * cell];
    canvas.width = w * ratio; canvas.height = h * ratio;
    canvas.style.width = `${w}px`; canvas.style.height = `${h}px`;
    const paint = canvas.getContext("2d"), gap = cell > 5 ? 1 : 0, ink = token("--ink");
    paint.scale(ratio, ratio);
    paint.font = `${Math.min(cell / 2.1, 11)}px system-ui, sans-serif`;
    paint.textAlign = "center"; paint.textBaseline = "middle";
    for (let r = 0; r < this.rows; r++) for (let c = 0; c < this.columns; c++) {
      const fill = this.fill(r, c);
      if (!fill) continue;
      paint.fillStyle = fill;
      paint.fillRect(c * cell, r * cell, cell - gap, cell - gap);
      if (cell >= 15) { paint.fillStyle = "#1b1b1b"; paint.fillText(this.name(r, c), (c + .5) * cell - gap / 2, (r + .5) * cell); }
      if (this.marked(r, c)) { paint.strokeStyle = ink; paint.lineWidth = 1.5; paint.strokeRect(c * cell + .5, r * cell + .5, cell - 1 - gap, cell - 1 - gap); }
    }
    return this;
  }
}

function tilePicture(tile, note) {
  const held = holders(tile), columns = columnsOf(tile.shape), rows = sizeOf(tile.shape) / columns;
  const hues = { thread: at => held.lane[at] * 360 / held.lanes, warp: at => held.warp[at] * 360 / Math.max(held.warps, 2), register: at => held.register[at] * 360 / held.registers };
  const numbers = { thread: held.lane, warp: held.warp, register: held.register };
  let by = "thread";
  const at = (r, c) => r * columns + c;
  const cells = new Cells(`Threads of ${tile.name}`, rows, columns, {
    fill: (r, c) => tinted(hues[by](at(r, c)), 70 + 8 * (held.warp[at(r, c)] % 2)), name: (r, c) => numbers[by][at(r, c)],
    say: (r, c) => {
      if (r === "") return note.replaceChildren("Point at a cell.");
      const k = at(r, c), [lane, warp] = [held.lane[k], held.warp[k]];
      cells.mark((i, j) => held.lane[at(i, j)] === lane && held.warp[at(i, j)] === warp);
      const copies = held.copies[k] > 1 ? `, and ${held.copies[k] - 1} more ${held.copies[k] > 2 ? "places" : "place"}` : "";
      note.replaceChildren(`Element (${tile.shape.length > 1 ? `${r}, ` : ""}${tile.shape.length > 1 ? c : k}): warp ${warp}, thread ${lane}, register ${held.register[k]}${copies}. All elements of this thread are framed.`);
    } });
  const choose = element("span", { class: "control" }, element("span", { class: "muted" }, "colour and number:"),
    ["thread", "warp", "register"].map(name => element("button", { type: "button", "aria-pressed": String(name === by), onclick: event => {
      by = name;
      for (const one of event.target.parentNode.querySelectorAll("button")) one.setAttribute("aria-pressed", String(one === event.target));
      cells.draw();
    } }, name)));
  return [pairs([["of a thread", `${held.registers} elements`], ["threads", `${held.lanes} of a warp, ${held.warps} ${held.warps > 1 ? "warps" : "warp"}`]]), choose, cells.draw().root];
}

function bufferPicture(buffer, note) {
  const place = bytesOf(buffer), columns = columnsOf(buffer.shape), rows = sizeOf(buffer.shape) / columns, width = buffer.bits / 8;
  const bank = k => (place[k] >> 2) % BANKS, words = new Map();
  place.forEach((byte, k) => { for (let w = byte >> 2; w * 4 < byte + width; w++) if (!words.has(w)) words.set(w, k); });
  const lines = Math.floor((Math.max(...words.keys()) + BANKS) / BANKS);
  const row = k => Math.floor(k / columns);
  const say = k => {
    if (k === undefined) return note.replaceChildren("Point at a cell.");
    tile.mark((r, c) => place[r * columns + c] >> 2 === place[k] >> 2);
    memory.mark((r, c) => r * BANKS + c === place[k] >> 2);
    note.replaceChildren(`Element (${row(k)}, ${k % columns}): byte ${place[k]}, bank ${bank(k)}, line ${place[k] >> 7} of memory.`);
  };
  const leave = f => (r, c) => (r === "" ? (tile.mark(() => false), memory.mark(() => false), note.replaceChildren("Point at a cell.")) : f(r, c));
  const tile = new Cells(`Banks of ${buffer.name}`, rows, columns, { fill: (r, c) => tinted(bank(r * columns + c) * 360 / BANKS),
    name: (r, c) => bank(r * columns + c), say: leave((r, c) => say(r * columns + c)) });
  const memory = new Cells(`Memory of ${buffer.name}`, lines, BANKS, {
    fill: (r, c) => (words.has(r * BANKS + c) ? tinted(row(words.get(r * BANKS + c)) * 137.5 % 360) : "transparent"),
    name: (r, c) => (words.has(r * BANKS + c) ? row(words.get(r * BANKS + c)) : ""), say: leave((r, c) => words.has(r * BANKS + c) && say(words.get(r * BANKS + c))) });
  return [element("h3", {}, "The tile, coloured by bank"), tile.draw().root,
    element("h3", {}, "Memory: 32 banks of 4 bytes a line, coloured and numbered by the tile's row"), memory.draw().root];
}

// Which thread (or row) is served in which wavefront: a bank gives one word at a time.
function wavefronts(access) {
  const rows = [];
  let first = 0;
  for (let at = 0; at < access.offsets.length; at += access.together) {
    const count = new Array(BANKS).fill(0), seen = new Set();
    let most = 0;
    access.offsets.slice(at, at + access.together).forEach((byte, k) => {
      for (let w = byte >> 2; w * 4 < byte + access.width; w++) {
        if (seen.has(w)) continue;
        seen.add(w);
        const turn = count[w % BANKS]++;
        most = Math.max(most, turn + 1);
        (rows[first + turn] ||= new Array(BANKS).fill(-1))[w % BANKS] = at + k;
      }
    });
    first += most;
  }
  return rows;
}

const HOW = {
  ldmatrix: { read: "ldmatrix: eight rows of 16 bytes", write: "stmatrix: eight rows of 16 bytes" },
  "ldmatrix.trans": { read: "ldmatrix.trans: eight rows of 16 bytes", write: "stmatrix.trans: eight rows of 16 bytes" },
  rows: { product: "the product: eight rows of 16 bytes" },
};
const howOf = access => (access.kind === "copy" ? "a tensor map: whole rows, no threads"
  : !access.known ? "not known" : HOW[access.how]?.[access.kind] || `${access.width} bytes of each thread`);
const verdict = access => {
  if (!access.known) return element("span", { class: "muted" }, "–");
  const ways = access.wavefronts / access.least;
  return element("span", { class: ways > 1 ? "bad" : "good" }, ways > 1 ? `${Number(ways.toPrecision(2))}-fold conflict` : "no conflict");
};

function accessPicture(access, note) {
  const rows = wavefronts(access), what = access.how === "vector" ? "thread" : "row", n = access.offsets.length;
  const cells = new Cells("Wavefronts", rows.length, BANKS, { most: 26, fill: (r, c) => (rows[r][c] >= 0 ? tinted(rows[r][c] * 360 / n) : token("--sunk")),
    name: (r, c) => (rows[r][c] >= 0 ? rows[r][c] : ""),
    say: (r, c) => {
      if (r === "") return note.replaceChildren("Point at a cell.");
      const who = rows[r][c];
      cells.mark((i, j) => who >= 0 && rows[i][j] === who);
      note.replaceChildren(who >= 0 ? `Bank ${c}, wavefront ${r}: ${what} ${who}, byte ${access.offsets[who]} of the buffer.` : `Bank ${c}, wavefront ${r}: idle.`);
    } });
  return [element("p", { class: "muted small" }, `One row a wavefront, one column a bank, with the number of the ${what} that is served. It takes ${access.wavefronts}, and ${access.least} without conflicts.`), cells.draw().root];
}

const placesOf = one => one.places.map(place => shown(place)).filter(Boolean).join(", ");

// A card with a choice on top: `draw(one, note)` gives what is below.
function chosen(title, about, all, text, draw, first = 0) {
  const place = element("div"), note = element("p", { class: "muted small said" }), head = element("p", { class: "small" });
  const choose = element("select", { "aria-label": title, onchange: event => show(Number(event.target.value)) },
    all.map((one, k) => element("option", { value: k }, text(one))));
  const show = k => {
    choose.value = String(k);
    const one = all[k], where = placesOf(one);
    head.replaceChildren(one.about ? `${one.about} ` : "", where ? element("span", { class: "muted" }, `At ${where}.`) : "");
    note.replaceChildren(one.known ? "Point at a cell." : "");
    place.replaceChildren(...(one.known ? draw(one, note) : [element("p", { class: "muted" }, "There is no picture of it.")]),
      element("details", { class: "small" }, element("summary", {}, "as the compiler writes it"), element("p", { class: "mono anywhere" }, one.text || one.op)));
  };
  show(first);
  return { card: element("section", { class: "card" }, element("h2", {}, title), element("p", { class: "muted small" }, about),
    element("div", { class: "control" }, choose), head, note, place), show };
}

function gpuLayouts(layouts, cards) {
  const { tiles, buffers, accesses } = layouts;
  if (accesses.length) {
    const text = one => `${one.kind}: ${one.tile >= 0 ? `${tiles[one.tile].name}, ` : ""}${buffers[one.buffer].name} ${shapeText(buffers[one.buffer].dtype, buffers[one.buffer].shape)}`;
    const worst = accesses.map((one, k) => [one.known ? one.wavefronts / one.least : 0, k]).sort((a, b) => b[0] - a[0])[0][1];
    const detail = chosen("One access in banks", "Of the first access of a warp. Threads that want different words of one bank wait for each other.",
      accesses, text, accessPicture, worst);
    const rows = accesses.map((one, k) => element("tr", {}, [element("button", { type: "button", class: "plain", onclick: () => { detail.show(k); detail.card.scrollIntoView({ behavior: "smooth", block: "nearest" }); } }, one.kind),
      one.tile >= 0 ? tiles[one.tile].name : "–", `${buffers[one.buffer].name} ${shapeText(buffers[one.buffer].dtype, buffers[one.buffer].shape)}`,
      howOf(one), one.known ? `${one.wavefronts} of ${one.least}` : "–", verdict(one)].map(cell => element("td", {}, cell))));
    cards.push(element("section", { class: "card" }, element("h2", {}, "Accesses of shared memory"),
      element("p", { class: "muted small" }, "Counted from the layouts. Wavefronts: how many one access of a warp takes, of how many it takes without bank conflicts."),
      element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {},
        ["access", "registers", "buffer", "by", "wavefronts", ""].map(name => element("th", {}, name)))), element("tbody", {}, rows)))), detail.card);
  }
  if (buffers.length) cards.push(chosen("Shared memory", "Where the elements of a buffer lie. A swizzle moves the words of each row, so that a column is spread over banks.",
    buffers, one => `${one.name} ${one.slots > 1 ? `${one.slots} × ` : ""}${shapeText(one.dtype, one.shape)}, ${one.bytes.toLocaleString("en")} bytes`, bufferPicture).card);
  if (tiles.length) cards.push(chosen("Registers", "Which thread holds which element of a tile.",
    tiles, one => `${one.name} ${shapeText(one.dtypes.join("/"), one.shape)}, ${one.values} values`, tilePicture).card);
}

function cpuVectors(v, cards) {
  const lanes = v.bytes / 4, most = Math.max(...v.rows.flatMap(row => row.registers));
  const rows = v.rows.map(row => element("tr", {},
    element("td", { class: "mono" }, row.place ? shown(row.place) : "between lines"), element("td", { class: "mono" }, String(row.instructions)),
    row.registers.map((n, k) => element("td", { class: "heat", title: `${v.name}${k}: ${n} instructions`,
      style: n ? `background:color-mix(in srgb, var(--accent) ${Math.round(20 + 80 * Math.log(1 + n) / Math.log(1 + most))}%, var(--panel))` : "" }))));
  cards.push(element("section", { class: "card" }, element("h2", {}, "Vector registers"),
    element("p", {}, `The machine code names ${v.used} of the ${v.count} vector registers; the widest are ${v.name}, of ${v.bytes} bytes, which hold ${lanes} float32 that are neighbours in a tile.`),
    element("p", { class: "muted small" }, v.stack ? `${v.stack} instructions move a vector to the stack or from it, as values do that find no register.` : "No vector goes through the stack."),
    element("p", { class: "muted small" }, "How many instructions of a line name each register; darker are more."),
    element("div", { class: "scroll" }, element("table", { class: "heats" }, element("thead", {}, element("tr", {}, element("th", {}, "line"), element("th", {}, "instructions"),
      v.rows[0].registers.map((_, k) => element("th", {}, k % 4 ? "" : String(k))))), element("tbody", {}, rows)))));
}

views.layouts = {
  title: "Layouts",
  about: "Where the elements of tiles are: registers, banks of shared memory, vectors.",
  has: piece => Boolean(piece.layouts),
  show(main, piece) {
    const { layouts } = piece, cards = [];
    if (layouts.vectors) cpuVectors(layouts.vectors, cards);
    if (layouts.notes.length) cards.push(element("section", { class: "card" }, element("ul", { class: "notes" }, layouts.notes.map(text => element("li", {}, text)))));
    main.append(element("div", { class: "sheet" }, cards));
    const made = [];
    if (!layouts.vectors) gpuLayouts(layouts, made);
    main.firstChild.prepend(...made);
  },
};
