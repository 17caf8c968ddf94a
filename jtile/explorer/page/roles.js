"use strict";
// Roles, the rings and barriers that they share, and what they do when.

const WAITS = ["#b9b5ad", "#d99a5b", "#b4544a", "#8e7dbe", "#c9a94a", "#81523f", "#c97f8b", "#8a8a8a"];
const LANE = 24;

function timeline(roles, program, zoom) {
  const label = 112, inner = Math.max(Math.min(innerWidth - 180, 1060) - label, 200) * zoom;
  const lanes = program.lanes, h = lanes.length * LANE + 26, x = t => label + t / Math.max(program.length, 1) * inner;
  const svg = drawn("svg", { width: label + inner + 12, height: h, role: "img", "aria-label": "Timeline", style: "max-width:none" });
  const waits = roles.kinds.filter(kind => kind.startsWith("wait"));
  const colour = kind => kind.startsWith("wait") ? WAITS[waits.indexOf(kind) % WAITS.length]
    : { "products under way": "var(--accent)", "asked for, not yet read": "var(--line)", "being read": "var(--accent)" }[kind];
  lanes.forEach((lane, k) => {
    const y = k * LANE + 3, tall = LANE - 7;
    svg.append(drawn("text", { x: label - 8, y: y + 13, "text-anchor": "end" }, lane.name));
    svg.append(drawn("line", { x1: label, x2: label + inner, y1: y + tall + 2, y2: y + tall + 2, stroke: "var(--line)" }));
    for (let at = 0; at < lane.spans.length; at += 4) {
      const [number, place, from, to] = lane.spans.slice(at, at + 4), kind = roles.kinds[number];
      const title = drawn("title", {}, `${kind}, ${from} to ${to} ${roles.unit}${place ? `, ${shown(place)}` : ""}`);
      if (kind.startsWith("role ")) {
        svg.append(drawn("rect", { x: x(from), y, width: Math.max(x(to) - x(from), 1), height: tall, fill: "var(--good)", opacity: .55, rx: 2 }, title));
      } else if (to > from || colour(kind)) {
        svg.append(drawn("rect", { x: x(from), y, width: Math.max(x(to) - x(from), .8), height: tall, fill: colour(kind) || "var(--faint)" }, title));
      } else {
        const tick = kind.startsWith("product") ? "var(--ink)" : kind.startsWith("store") ? "var(--warm)" : "var(--accent)";
        const short = /^(arrive|expect)/.test(kind);
        svg.append(drawn("rect", { x: x(from), y: short ? y + tall - 5 : y - 2, width: 1.6, height: short ? 5 : tall + 2, fill: tick }, title));
      }
    }
  });
  const step = 10 ** Math.floor(Math.log10(Math.max(program.length / zoom, 1)) );
  const every = program.length / zoom / step > 5 ? step : step / 2;
  for (let t = 0; t <= program.length; t += Math.max(every, 1))
    svg.append(drawn("text", { x: x(t), y: h - 6, "text-anchor": "middle" }, String(Math.round(t))));
  const keys = element("div", { class: "keys small muted" },
    [["works", "var(--good)"], ...waits.map(kind => [kind, colour(kind)]), ["products under way, or a slot being read", "var(--accent)"],
      ["a slot asked for", "var(--line)"]]
      .map(([name, fill]) => element("span", {}, element("i", { style: `background:${fill}` }), name)));
  return [element("div", { class: "scroll" }, svg), keys];
}

// Who fills a ring and who reads it, as a row of slots between roles.
function ringPicture(ring, roles) {
  const names = list => list.map(k => roles[k].name).join(", ") || "nobody";
  return element("div", { class: "ring" },
    element("div", {}, element("b", { class: "mono" }, ring.name), " ",
      element("span", { class: "muted small" }, `${ring.slots} × ${ring.dtype}[${ring.shape.join(", ")}], ${ring.bytes.toLocaleString("en")} bytes`)),
    element("div", { class: "flow" }, element("span", { class: "role" }, names(ring.writers)), element("span", { class: "arrow" }, "→"),
      element("span", { class: "slots" }, Array.from({ length: Math.min(ring.slots, 12) }, (_, k) => element("i", {}, String(k)))),
      element("span", { class: "arrow" }, "→"), element("span", { class: "role" }, names(ring.readers))));
}

views.roles = {
  title: "Roles",
  about: "The roles of the kernel, their rings and barriers, and what they do when.",
  has: piece => Boolean(piece.roles),
  show(main, piece) {
    const { roles } = piece, cards = [];
    const card = (title, ...children) => cards.push(element("section", { class: "card" }, element("h2", {}, title), ...children));
    if (roles.programs.length) {
      const measured = roles.unit === "ns", place = element("div");
      let program = 0, zoom = 1;
      const draw = () => place.replaceChildren(...timeline(roles, roles.programs[program], zoom));
      const choose = element("select", { "aria-label": "Program", onchange: event => { program = Number(event.target.value); draw(); } },
        roles.programs.map((one, k) => element("option", { value: k }, `program ${one.number}: ${one.length} ${roles.unit}, products ${Math.round(one.busy * 100)} %`)));
      const nearer = element("input", { type: "range", min: 0, max: 5, step: .5, value: 0, "aria-label": "Zoom",
        oninput: event => { zoom = 2 ** Number(event.target.value); draw(); } });
      card(measured ? "Timeline, measured" : "Timeline, simulated",
        element("p", { class: "muted small" }, measured ? "Nanoseconds of this GPU; each note of a role takes it some tens of them."
          : "Steps of the interpreter, not times: they say what waits for what."),
        element("div", { class: "control" }, choose, element("label", { class: "muted" }, "zoom"), nearer), place,
        element("ul", { class: "notes small" }, roles.shares.map(text => element("li", {}, text))));
      draw();
    }
    if (roles.notes.length) card("Left out", element("ul", { class: "notes" }, roles.notes.map(text => element("li", {}, text))));
    card("Rings of shared memory", element("p", { class: "muted small" }, "Who fills a buffer, its slots, and who reads it."),
      roles.rings.map(ring => ringPicture(ring, roles.roles)));
    const names = list => list.map(k => roles.roles[k].name).join(", ") || "–";
    card("Barriers", element("div", { class: "scroll" }, element("table", {},
      element("thead", {}, element("tr", {}, ["barrier", "slots", "arrivals", "expects bytes", "arrives", "waits"].map(text => element("th", {}, text)))),
      element("tbody", {}, roles.barriers.map(one => element("tr", {}, [element("span", { class: "mono" }, one.name), one.slots, one.arrivals,
        names(one.expects), names(one.arrives), names(one.waits)].map(cell => element("td", {}, cell instanceof Node ? cell : String(cell)))))))));
    card("Warps and registers", pairs(roles.roles.map(one => [one.name, `${one.warps} warps, ${one.registers || "what is left of the"} registers a thread`])));
    main.append(element("div", { class: "sheet" }, cards));
  },
};
