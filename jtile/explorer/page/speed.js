"use strict";
// How fast the kernel can be and is: the roofline, what it takes of the machine, and advice.

const units = (n, base = 1000, names = ["", "k", "M", "G", "T", "P"]) => {
  const power = n > 0 ? Math.min(Math.floor(Math.log(n) / Math.log(base)), names.length - 1) : 0;
  return `${Number((n / base ** Math.max(power, 0)).toPrecision(3))} ${names[Math.max(power, 0)]}`.trim();
};
const time = us => (us >= 1000 ? `${Number((us / 1000).toPrecision(3))} ms` : `${Number(us.toPrecision(3))} µs`);

// Operations a second over operations a byte, both axes logarithmic.
function roofline(speed) {
  const flops = Object.values(speed.products).reduce((sum, n) => sum + n, 0);
  const done = flops || speed.elements, bytes = speed.read + speed.written;
  const dtype = Object.keys(speed.products).sort((a, b) => speed.products[b] - speed.products[a])[0];
  const peak = flops ? speed.peaks[dtype] || speed.peaks.float32 : (speed.peaks.float32 || 0) / 2;
  const bound = Math.max(...Object.values(speed.limits));
  if (!speed.memory || !peak || !done || !bytes) return null;
  const x = done / bytes, ridge = peak / speed.memory;
  const points = [["bound", done / bound * 1e6, "--accent", `at best ${time(bound)}`]];
  if (speed.time_us) points.push(["measured", done / speed.time_us * 1e6, "--warm", `measured ${time(speed.time_us)}`]);
  const x0 = 10 ** Math.floor(Math.log10(Math.min(x, ridge) / 3)), x1 = 10 ** Math.ceil(Math.log10(Math.max(x, ridge) * 3));
  const low = Math.min(...points.map(p => p[1]), speed.memory * x0);
  const y0 = 10 ** Math.floor(Math.log10(low)), y1 = 10 ** Math.ceil(Math.log10(peak * 1.2));
  const w = Math.max(Math.min(520, innerWidth - 50), 280), h = 280, l = 58, b = 38, t = 14, r = 16;
  const at = (v, low, high) => (Math.log10(v) - Math.log10(low)) / (Math.log10(high) - Math.log10(low));
  const px = v => l + at(v, x0, x1) * (w - l - r), py = v => h - b - at(v, y0, y1) * (h - t - b);
  const svg = drawn("svg", { viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": "Roofline" });
  // The rate of memory stands along its line, where the kernel's own point does not.
  const beside = x0 * (ridge / x0) ** (at(x, x0, ridge) > 0.5 ? 0.25 : 0.75);
  for (let v = x0; v <= x1 * 1.001; v *= 10) svg.append(
    drawn("line", { x1: px(v), x2: px(v), y1: t, y2: h - b, stroke: "var(--line)" }),
    drawn("text", { x: px(v), y: h - b + 15, "text-anchor": "middle" }, String(Number(v.toPrecision(1)))));
  for (let v = y0; v <= y1 * 1.001; v *= 10) svg.append(
    drawn("line", { x1: l, x2: w - r, y1: py(v), y2: py(v), stroke: "var(--line)" }),
    drawn("text", { x: l - 6, y: py(v) + 4, "text-anchor": "end" }, units(v)));
  svg.append(
    drawn("text", { x: (l + w - r) / 2, y: h - 4, "text-anchor": "middle" }, "operations a byte"),
    drawn("text", { x: 12, y: (t + h - b) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(t + h - b) / 2})` },
      "operations a second"),
    drawn("polyline", { fill: "none", stroke: "var(--ink)", "stroke-width": 1.6,
      points: [[x0, Math.max(speed.memory * x0, y0)], [ridge, peak], [x1, peak]].map(([a, c]) => `${px(a)},${py(Math.min(c, peak))}`).join(" ") }),
    drawn("text", { x: px(x1) - 4, y: py(peak) - 8, "text-anchor": "end" }, `${flops ? dtype : "elements"}: ${units(peak)} a second`),
    drawn("text", { x: px(beside) + 8, y: py(speed.memory * beside) + 16 }, `memory: ${units(speed.memory)}B a second`));
  // Labels stand below their points, and below both where these are near each other.
  const dots = points.map(p => py(p[1])), near = Math.max(...dots) - Math.min(...dots) < 30;
  let below = near ? Math.max(...dots) + 4 : 0;
  for (const [, y, colour, label] of points) {
    below = Math.max(py(y) + 19, below + 15);
    svg.append(drawn("circle", { cx: px(x), cy: py(y), r: 5, fill: `var(${colour})` }),
      drawn("text", { x: px(x), y: below, "text-anchor": px(x) > w * 0.7 ? "end" : "middle", style: `font-weight:600;fill:var(${colour})` }, label));
  }
  return svg;
}

const pairs = rows => element("dl", { class: "facts" }, rows.filter(Boolean).flatMap(([name, value]) =>
  [element("dt", {}, name), element("dd", {}, value)]));

function bars(speed) {
  const most = Math.max(...Object.values(speed.limits), speed.time_us || 0);
  const names = { memory: "memory", products: "matrix products", elements: "arithmetic" };
  const rows = Object.entries(speed.limits).map(([name, us]) => [names[name], us, "--accent"]);
  if (speed.time_us) rows.push(["measured", speed.time_us, "--warm"]);
  return element("div", { class: "bars" }, rows.map(([name, us, colour]) => [
    element("span", { class: "muted" }, name),
    element("span", { class: "bar2" }, element("i", { style: `width:${Math.max(us / most * 100, 0.5)}%;background:var(${colour})` })),
    element("span", { class: "mono" }, time(us))]));
}

views.speed = {
  title: "Speed",
  about: "The roofline of the kernel, what it takes of the machine, and advice.",
  show(main, piece) {
    const { speed, facts } = piece, cards = [];
    const card = (title, ...children) => cards.push(element("section", { class: "card" }, element("h2", {}, title), ...children));
    if (speed) {
      const chart = roofline(speed), whose = speed.measured ? "this machine, as measured" : "the target's data sheet";
      const guess = speed.exact ? "" : " (guessed: the length of a loop depends on data)";
      if (Object.keys(speed.limits).length) card("Roofline", chart, bars(speed),
        element("p", { class: "muted small" }, `Rates of ${whose}. Limited by: ${speed.limit || "not known"}.`
          + (speed.time_us ? ` The kernel reaches ${Math.round(100 * Math.max(...Object.values(speed.limits)) / speed.time_us)} % of its bound.` : " Its time was not measured.")));
      else card("Roofline", element("p", { class: "muted" }, "The rates of this target are not known, so that there is no bound to compare with."));
      const flops = Object.entries(speed.products).map(([dtype, n]) => `${units(n)} in ${dtype}`).join(", ");
      card("Work of one call", pairs([
        ["reads", `${units(speed.read)}B`], ["writes", `${units(speed.written)}B`],
        ["all loads and stores", `${units(speed.traffic)}B, ${Number((speed.traffic / Math.max(speed.read + speed.written, 1)).toPrecision(2))} times as much${guess}`],
        flops && ["operations of products", flops],
        ["operations on elements", `${units(speed.elements)}, ${units(speed.special)} of them exponentials and the like`]]));
      const r = speed.resources;
      if (r.registers != null) card("What a block takes", pairs([
        ["registers of a thread", `${r.registers} of 255`], ["spilled", `${r.spills} bytes`],
        ["shared memory", `${r.shared.toLocaleString("en")} bytes`], ["threads", r.threads],
        ["blocks a multiprocessor", r.blocks], ["occupancy", `${Math.round(r.occupancy * 100)} %`]]),
        element("div", { class: "meter", title: "occupancy" }, element("i", { style: `width:${r.occupancy * 100}%` })));
    }
    const advice = [...(speed?.advice || [])];
    card("Advice", advice.length ? element("ul", { class: "notes" }, advice.map(text => element("li", {}, text)))
      : element("p", { class: "muted" }, "Nothing is known that would help."));
    const said = Object.entries(facts).filter(([, text]) => text);
    const names = { resources: "Resources", sharding: "Partitioning", choice: "How tiles were chosen", schedule: "Schedule" };
    if (said.length) card("What the compiler says", pairs(said.map(([name, text]) => [names[name] || name, element("span", { class: "pre" }, text)])));
    if (record.notes.length) card("Notes", element("ul", { class: "notes" }, record.notes.map(text => element("li", {}, text))));
    main.append(element("div", { class: "sheet" }, element("div", { class: "columns" }, cards)));
  },
};
