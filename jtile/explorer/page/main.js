"use strict";
// The frame: which kernel and which view is shown, kept behind the # of the address, and keys.

const KEYS = [
  ["1 – 9", "choose a view"], ["n / p", "next or previous kernel"], ["j / k", "next or previous line, or pass"],
  ["[ / ]", "level before or after"], ["/", "find in the level"], ["← / →", "program, or round, before or after"],
  ["space", "play or stop"], ["Esc", "let go of a line"], ["t", "light or dark"], ["?", "this list"],
];
const at = id => document.getElementById(id);
let own = {};

function render() {
  const piece = record.pieces[state.kernel];
  const main = at("main");
  own.stop?.();
  main.replaceChildren();
  const names = Object.keys(views).filter(name => !views[name].has || views[name].has(piece));
  if (!names.includes(state.view)) state.view = names[0];
  at("tabs").replaceChildren(...names.map(name => element("button", {
    role: "tab", type: "button", title: views[name].about, "aria-selected": String(name === state.view),
    onclick: () => go(name),
  }, views[name].title)));
  at("kernel").value = String(state.kernel);
  own = views[state.view].show(main, piece) || {};
  keep();
}

function go(view) {
  state.view = view;
  render();
}

function turn(by) {
  state.kernel = (state.kernel + by + record.pieces.length) % record.pieces.length;
  state.step = null;
  render();
}

function shade() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  try { localStorage.setItem("jtile.view.theme", document.documentElement.dataset.theme); } catch { /* a file */ }
  render();
}

async function start() {
  record = await loaded();
  at("title").textContent = record.title;
  at("target").textContent = at("target").title = record.target;
  const groups = new Map();
  record.pieces.forEach((piece, k) => {
    if (!groups.has(piece.group))
      groups.set(piece.group, element("optgroup", { label: piece.group === "gradient" ? "Gradient" : "Kernels" }));
    const times = piece.calls > 1 ? ` × ${piece.calls}` : "";
    groups.get(piece.group).append(element("option", { value: k }, piece.name + times));
  });
  at("kernel").append(...groups.values());
  at("kernel").addEventListener("change", () => { state.kernel = Number(at("kernel").value); state.step = null; render(); });
  at("keylist").append(...KEYS.flatMap(([key, what]) => [element("dt", {}, key), element("dd", {}, what)]));
  at("help").addEventListener("click", () => at("keys").showModal());
  at("theme").addEventListener("click", shade);
  try {
    const kept = localStorage.getItem("jtile.view.theme");
    if (kept) document.documentElement.dataset.theme = kept;
  } catch { /* a page without storage */ }
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, dialog")) {
      if (event.key === "Escape") document.activeElement.blur();
      return;
    }
    const names = [...at("tabs").children];
    const wide = { t: shade, n: () => turn(1), p: () => turn(-1), "?": () => at("keys").showModal() };
    const act = own[event.key] || wide[event.key] || (/^[1-9]$/.test(event.key) ? () => names[event.key - 1]?.click() : null);
    if (!act) return;
    event.preventDefault();
    act();
  });
  window.addEventListener("hashchange", () => { if (location.hash.slice(1) !== written) { restore(); render(); } });
  restore();
  render();
}

start();
