"use strict";
// What is looked at. It stands behind the # of the address, so that a page that is loaded anew shows the same.

const views = {};
const state = { kernel: 0, view: "code", level: "", place: 0, step: null, program: 0, round: 0 };
let written = "";

function keep() {
  const parts = Object.entries(state).filter(([, value]) => value != null && value !== "" && value !== 0);
  const shown = record.places[state.place];
  written = parts.map(([name, value]) => `${name}=${encodeURIComponent(name === "place" ? shown.join(":") : value)}`).join("&");
  try { history.replaceState(null, "", `#${written}`); } catch { /* inside of a notebook */ }
}

function restore() {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (!(name in state)) continue;
    if (name === "place") state.place = Math.max(record.places.findIndex(place => place.join(":") === value), 0);
    else state[name] = /^\d+$/.test(value) ? Number(value) : value;
  }
  state.kernel = Math.min(state.kernel, record.pieces.length - 1);
}
