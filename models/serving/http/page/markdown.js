// Markdown of a model's answer as elements. All of the answer becomes text nodes: none of it is ever HTML.

import { element, link } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const CLOSING = /(?<!\s)\s+#+\s*$/; // begins where spaces begin, so that a long run of them takes no long time
const TABLE = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;
const DEEP = 8; // quotes and lists inside of each other; what lies deeper is plain text

// One alternative for each form, all of them of bounded length, so that no text takes long.
const INLINE = new RegExp(
  [
    /\\([!-/:-@[-`{-~])/, // 1: an escaped sign
    /(?<!`)(`{1,3})(?!`)([^]{1,2000}?)(?<!`)\2(?!`)/, // 3: code
    /!?\[((?:[^[\]\\]|\\.){0,500})\]\(\s*<?([^\s<>]{1,2000}?)>?(?:\s+"[^"]{0,500}")?\s*\)/, // 4: text, 5: address
    /(\*\*|__)(?=\S)([^]{0,2000}?\S)\6(?!\*)/, // 7: strong
    /~~(?=\S)([^]{0,2000}?\S)~~/, // 8: struck out
    /\*(?=[^\s*])([^*]{0,2000}?[^\s*])\*(?!\*)/, // 9: emphasis
    /(?<![\p{L}\p{N}_])_(?=[^\s_])([^_]{0,2000}?[^\s_])_(?![\p{L}\p{N}_])/u, // 10: emphasis
    /(https?:\/\/[^\s<>"'`]{1,2000})/, // 11: an address
    /((?<! ) {2,}|\\)\n/, // 12: the end of a line
  ].map((form) => form.source).join("|"),
  "gu",
);

/** Brings `parent` to show a text; blocks that are as they were keep their elements. */
export function render(parent, text) {
  const sources = blocks(text);
  const old = parent.sources ?? [];
  let same = 0;
  while (same < old.length && same < sources.length && old[same] === sources[same]) same++;
  while (parent.childNodes.length > same) parent.lastChild.remove();
  for (const source of sources.slice(same)) parent.append(block(source, 0));
  parent.sources = sources;
}

/** The text of each block, outermost ones only. */
function blocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const end = lines[at].trim() ? endOf(lines, at) : at + 1;
    if (lines[at].trim()) found.push(lines.slice(at, end).join("\n").replace(/\n+$/, ""));
    at = end;
  }
  return found;
}

function endOf(lines, at) {
  const fence = FENCE.exec(lines[at]);
  let end = at + 1;
  if (fence) {
    const closes = (line) => line.trim().startsWith(fence[1]) && !line.trim().replaceAll(fence[1][0], "");
    while (end < lines.length && !closes(lines[end])) end++;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(lines[at]) || RULE.test(lines[at])) return end;
  const item = ITEM.exec(lines[at]);
  const goesOn = item
    ? (i) => isOther(item, lines[i]) ? false : /^\s/.test(lines[i]) || ITEM.test(lines[i]) || (lines[i].trim() ? lines[i - 1].trim() && !begins(lines, i)
      : /^\s+\S/.test(lines[i + 1] ?? "") || ITEM.test(lines[i + 1] ?? ""))
    : /^ {0,3}>/.test(lines[at]) ? (i) => /^ {0,3}>/.test(lines[i])
    : isTable(lines, at) ? (i) => lines[i].includes("|")
    : (i) => lines[i].trim() && !begins(lines, i);
  while (end < lines.length && goesOn(end)) end++;
  return end;
}

const isNumber = (item) => /\d/.test(item[2]);
/** Whether a line begins another list than `item`: one with numbers behind one without, or the other way round. */
function isOther(item, line) {
  const mark = ITEM.exec(line);
  return mark && mark[1].length < 2 && isNumber(mark) !== isNumber(item);
}

const isTable = (lines, i) => lines[i].includes("|") && TABLE.test(lines[i + 1]?.trimEnd() ?? "");
const begins = (lines, i) =>
  [FENCE, ITEM, RULE, HEADING, /^ {0,3}>/].some((form) => form.test(lines[i])) || isTable(lines, i);

function block(source, depth) {
  const lines = source.split("\n");
  const [first] = lines;
  const fence = FENCE.exec(first);
  if (fence) return code(lines, fence);
  const heading = HEADING.exec(first);
  if (heading) return element(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2].trimEnd().replace(CLOSING, "")));
  if (RULE.test(first)) return element("hr");
  if (isTable(lines, 0)) return table(lines);
  if (depth < DEEP && ITEM.test(first)) return list(lines, depth);
  if (depth < DEEP && /^ {0,3}>/.test(first)) {
    return element("blockquote", {}, ...inner(lines.map((line) => line.replace(/^ {0,3}> ?/, "")), depth));
  }
  return element("p", {}, ...inline(source));
}

const inner = (lines, depth) => blocks(lines.join("\n")).map((source) => block(source, depth + 1));

function code(lines, fence) {
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence[1]);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = element("button", { type: "button", class: "quiet copy-code" }, "Copy");
  const head = element("div", { class: "code-head" }, element("span", {}, fence[2] || "text"), copy);
  return element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, element("code", {}, text)));
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
  const row = (line, kind) => element("tr", {}, ...cells(line).map((cell) => element(kind, {}, ...inline(cell))));
  const body = element("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  const head = element("thead", {}, row(lines[0], "th"));
  return element("div", { class: "table", tabindex: "0" }, element("table", {}, head, body));
}

function list(lines, depth) {
  const number = parseInt(lines[0].trim(), 10);
  const made = Number.isNaN(number) ? element("ul") : element("ol", { start: number });
  const items = [];
  for (const line of lines) {
    const mark = ITEM.exec(line);
    const nested = mark && items.length && mark[1].length >= Math.max(items.at(-1).width, 2);
    if (mark && !nested) items.push({ width: mark[0].trimEnd().length + 1, lines: [line.slice(mark[0].length)] });
    else items.at(-1).lines.push(line.replace(new RegExp(`^ {0,${items.at(-1).width}}`), ""));
  }
  for (const item of items) {
    const parts = inner(item.lines, depth);
    const tight = parts.flatMap((part) => (part.tagName === "P" ? [...part.childNodes] : [part]));
    made.append(element("li", {}, ...(parts.filter((part) => part.tagName === "P").length > 1 ? parts : tight)));
  }
  return made;
}

function inline(text, depth = 0) {
  const nodes = [];
  let at = 0;
  for (const found of depth < DEEP ? text.matchAll(INLINE) : []) {
    nodes.push(text.slice(at, found.index), form(found, depth + 1));
    at = found.index + found[0].length;
  }
  nodes.push(text.slice(at));
  return nodes.filter((node) => node !== "");
}

function form(found, depth) {
  const [whole, sign, , written, label, address, , strong, struck, star, line, bare, end] = found;
  if (sign !== undefined) return sign;
  if (written !== undefined) return element("code", {}, written.replace(/\n/g, " ").replace(/^ (.*\S.*) $/, "$1"));
  if (address !== undefined) return link(address, inline(label || address, depth), whole);
  if (strong !== undefined) return element("strong", {}, ...inline(strong, depth));
  if (struck !== undefined) return element("s", {}, ...inline(struck, depth));
  if (star ?? line) return element("em", {}, ...inline(star ?? line, depth));
  if (bare !== undefined) {
    const [address] = /^.*[^.,;:!?)\]*_]/.exec(bare) ?? [bare];
    return element("span", {}, link(address, [address], address), bare.slice(address.length));
  }
  return end === undefined ? whole : element("br");
}
