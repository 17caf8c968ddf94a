// Elements of texts and attributes.

/** An element; texts among the children become text nodes. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** A link where the address is one of the web or of mail, else the text as it stands. */
export function link(address, children, text) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return text;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return text;
  return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

/** The element of the page with an id. */
export const part = (id) => document.getElementById(id);

export function button(text, title, act) {
  const made = element("button", { type: "button", class: "quiet", title }, text);
  made.addEventListener("click", act);
  return made;
}
