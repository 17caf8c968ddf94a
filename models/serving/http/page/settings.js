// The dialog of settings, and the switch between light and dark.

import { part } from "./dom.js";
import * as store from "./store.js";

const THEMES = { "": "System", light: "Light", dark: "Dark" };
const dialog = part("settings"), form = dialog.querySelector("form");

/** Opens the dialog, for the key where the server has asked for one. */
export function openSettings(error = "") {
  fill();
  part("key-error").textContent = error;
  part("key-error").hidden = !error;
  if (!dialog.open) dialog.showModal();
  if (error) form.elements.key.focus();
}

/** `connected` is called when there is another key. */
export function setUp(connected) {
  showTheme();
  part("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES), now = store.settings();
    now.theme = names[(names.indexOf(now.theme) + 1) % names.length];
    store.keepSettings(now);
    showTheme();
  });
  part("settings-open").addEventListener("click", () => openSettings());
  part("defaults").addEventListener("click", () => {
    const { model, theme } = store.settings();
    store.keepSettings({ ...store.DEFAULTS, model, theme });
    fill();
  });
  form.addEventListener("change", read);
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.tagName === "INPUT") {
      event.preventDefault(); // the first button closes
      read();
      dialog.close();
    }
  });
  dialog.addEventListener("close", () => {
    if (form.elements.key.value !== store.key()) {
      store.keepKey(form.elements.key.value);
      connected();
    }
    part("text").focus();
  });
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // beside it
}

function fill() {
  for (const [name, value] of Object.entries(store.settings())) {
    const field = form.elements[name];
    if (field) typeof value === "boolean" ? (field.checked = value) : (field.value = value);
  }
  form.elements.key.value = store.key();
}

function read() {
  const now = store.settings();
  for (const name of Object.keys(now)) {
    const field = form.elements[name];
    if (!field) continue;
    if (field.type === "checkbox") now[name] = field.checked;
    else if (field.validity.valid) now[name] = field.value;
  }
  store.keepSettings(now);
}

function showTheme() {
  const { theme } = store.settings();
  document.documentElement.dataset.theme = theme in THEMES ? theme : "";
  part("theme").querySelector("span").textContent = THEMES[theme] ?? THEMES[""];
  part("theme").setAttribute("aria-label", `Colours: ${part("theme").textContent}`);
}
