"use strict";
// The source beside a level, and what the passes changed.

function sourceRows() {
  const places = new Map(record.places.map(([source, line], place) => [`${source}:${line}`, place]));
  return record.sources.flatMap((source, k) => {
    const head = record.sources.length > 1 ? [{ text: source.path, kind: "gap" }] : [];
    const lines = source.lines.map((text, j) =>
      ({ text, python: true, no: source.first + j, place: places.get(`${k}:${source.first + j}`) || 0 }));
    return [...head, ...lines];
  });
}
const widestOf = rows => rows.reduce((most, row) => Math.max(most, row.text.length), 0);

// Marks the lines of the same place in several lists.
class Links {
  constructor() {
    this.lists = [];
    this.over = 0;
  }

  add(list) {
    this.lists.push(list);
    return list;
  }

  hover(place) {
    if (place === this.over) return;
    this.over = place;
    this.light();
  }

  hold(place) {
    state.place = state.place === place ? 0 : place;
    keep();
    this.light();
    this.reveal();
  }

  light() {
    const set = place => new Set(place ? [place] : []);
    for (const list of this.lists) list.light(set(this.over), set(state.place));
  }

  reveal() {
    if (!state.place) return;
    for (const list of this.lists) {
      const k = list.rows.findIndex(row => row.place === state.place);
      const seen = list.rows.some((row, j) => row.place === state.place
        && j * ROW >= list.root.scrollTop && (j + 1) * ROW <= list.root.scrollTop + list.root.clientHeight);
      if (k >= 0 && !seen) list.reveal(k);
    }
  }
}

function linkedList(label, links) {
  return links.add(new Lines(label, { onplace: place => links.hover(place), onhold: place => links.hold(place) }));
}

views.code = {
  title: "Code",
  about: "The source beside every level that the kernel passes through; lines of one colour belong together.",
  show(main, piece) {
    const links = new Links();
    const source = linkedList("Source", links), level = linkedList("Level", links);
    const about = element("span"), count = element("span", { class: "count" });
    const strip = element("div", { class: "strip", role: "tablist", "aria-label": "Levels" });
    const search = element("input", { type: "search", placeholder: "Find", size: "10", "aria-label": "Find in the level" });
    const choose = name => {
      const found = piece.levels.find(one => one.name === name) || piece.levels[0];
      state.level = found.name;
      for (const button of strip.children) button.setAttribute("aria-selected", button.dataset.name === found.name);
      strip.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
      about.textContent = found.about;
      opened(found.body);
      count.textContent = `${found.body.lines.length.toLocaleString("en")} lines`;
      level.root.scrollTop = level.root.scrollLeft = 0;
      level.set(rowsOf(found.body), found.body.widest);
      links.light();
      links.reveal();
      keep();
    };
    for (const { name, title } of piece.levels)
      strip.append(element("button", { role: "tab", type: "button", "data-name": name, onclick: () => choose(name) }, title));
    const find = back => {
      const wanted = search.value.toLowerCase(), n = level.rows.length;
      if (!wanted) return;
      for (let step = 1; step <= n; step++) {
        const k = (((level.hit < 0 && back ? 0 : level.hit) + (back ? -step : step)) % n + n) % n;
        if (level.rows[k].text.toLowerCase().includes(wanted)) {
          level.hit = k;
          level.drawn = "";
          level.reveal(k);
          return;
        }
      }
    };
    search.addEventListener("keydown", event => event.key === "Enter" && find(event.shiftKey));
    main.append(element("div", { class: "split" },
      element("section", { class: "pane" },
        element("div", { class: "bar" }, element("h2", { style: "margin:0" }, record.sources[0]?.name || "Source")), source.root),
      element("section", { class: "pane" },
        element("div", { class: "bar" }, strip),
        element("div", { class: "about" }, about, element("span", { class: "grow" }), count, search), level.root)));
    const rows = sourceRows();
    source.set(rows, widestOf(rows));
    choose(state.level || "tile_ir_opt");
    const move = by => {
      const every = rows.filter(row => row.place);
      const at = every.findIndex(row => row.place === state.place);
      const next = every[Math.min(Math.max(at < 0 ? 0 : at + by, 0), every.length - 1)];
      if (next && next.place !== state.place) links.hold(next.place);
    };
    const turn = by => {
      const at = piece.levels.findIndex(one => one.name === state.level);
      choose(piece.levels[Math.min(Math.max(at + by, 0), piece.levels.length - 1)].name);
    };
    return { j: () => move(1), k: () => move(-1), "]": () => turn(1), "[": () => turn(-1),
      "/": () => search.focus(), Escape: () => state.place && links.hold(state.place) };
  },
};

// The rows of a difference; `context` lines around each change, the rest can be opened.
function diffRows(before, after, codes, open) {
  const rows = [], context = 4;
  const line = (body, k, kind) => ({ text: body.lines[k], place: body.of[k], no: k + 1, kind });
  codes.forEach(([kind, a0, a1, b0, b1], k) => {
    if (kind !== "equal") {
      for (let j = a0; j < a1; j++) rows.push(line(before, j, "del"));
      for (let j = b0; j < b1; j++) rows.push(line(after, j, "add"));
      return;
    }
    const head = k ? context : 0, tail = k < codes.length - 1 ? context : 0;
    if (b1 - b0 <= head + tail + 2 || open.has(k)) {
      for (let j = b0; j < b1; j++) rows.push(line(after, j));
      return;
    }
    for (let j = b0; j < b0 + head; j++) rows.push(line(after, j));
    rows.push({ text: `… ${b1 - b0 - head - tail} equal lines`, kind: "gap", comments: false, gap: k });
    for (let j = b1 - tail; j < b1; j++) rows.push(line(after, j));
  });
  return rows;
}

views.passes = {
  title: "Passes",
  about: "Tile IR after every pass, and what the pass changed.",
  show(main, piece) {
    const links = new Links(), list = linkedList("Kernel after the pass", links);
    const about = element("div", { class: "about" }), names = element("div", { class: "list" });
    const bodies = [];
    piece.steps.forEach((step, k) => bodies.push(step.body ? opened(step.body) : bodies[k - 1]));
    const choose = (k, open = new Set()) => {
      k = Math.min(Math.max(k, 0), piece.steps.length - 1);
      state.step = k;
      const step = piece.steps[k];
      [...names.querySelectorAll("button")].forEach((b, j) => b.setAttribute("aria-selected", j === k));
      names.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
      about.textContent = `${step.ensures} ${step.body ? "" : "It changed nothing here."}`;
      const rows = step.diff.length ? diffRows(bodies[k - 1], bodies[k], step.diff, open) : rowsOf(bodies[k]);
      for (const row of rows) if (row.gap != null) row.open = () => choose(k, new Set([...open, row.gap]));
      if (!open.size) list.root.scrollTop = 0;
      list.set(rows, widestOf(rows));
      links.light();
      keep();
    };
    let level = "";
    piece.steps.forEach((step, k) => {
      if (step.level !== level) {
        level = step.level;
        names.append(element("h3", {}, level === "tile" ? "Tiles" : "Block level"));
      }
      const plus = step.diff.reduce((n, [kind, , , b0, b1]) => n + (kind === "equal" ? 0 : b1 - b0), 0);
      const minus = step.diff.reduce((n, [kind, a0, a1]) => n + (kind === "equal" ? 0 : a1 - a0), 0);
      names.append(element("button", { type: "button", class: step.body ? "" : "idle", onclick: () => choose(k) },
        element("span", { class: "num" }, String(k)), step.name,
        element("span", { class: "delta" }, step.diff.length ? `+${plus} −${minus}` : "")));
    });
    main.append(element("div", { class: "passes" }, names, element("section", { class: "pane" }, about, list.root)));
    const first = piece.steps.findIndex(step => step.diff.length);
    choose(state.step ?? Math.max(first, 0));
    return { j: () => choose(state.step + 1), k: () => choose(state.step - 1) };
  },
};
