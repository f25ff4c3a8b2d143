// What the pages of kas have in common. What comes from kas or a cluster is put into the document as text, never as
// markup.
"use strict";

const $ = (id) => document.getElementById(id);

/** Makes an element; attributes that are null are left out. */
function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Replaces an element's children, unless they are the same: focus and selection stay. */
function show(element, ...children) {
  const next = document.createElement("div");
  next.append(...children);
  const same =
    next.childNodes.length === element.childNodes.length &&
    [...next.childNodes].every((child, n) => child.isEqualNode(element.childNodes[n]));
  if (!same) keepFocus(element, () => element.replaceChildren(...next.childNodes));
}

/** Focus goes back to the link of the same name when what held it is made anew. */
function keepFocus(element, change) {
  const focused = element.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  change();
  if (focused) for (const link of element.querySelectorAll("a")) if (link.getAttribute("href") === focused) return link.focus();
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const count = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;
const known = (n) => (n === null || n === undefined ? "–" : n.toLocaleString("en"));
const rate = (n) => (n === null || n === undefined ? "–" : n < 10 ? n.toFixed(1) : Math.round(n).toLocaleString("en"));
const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

function ago(ms) {
  const seconds = Math.max(0, Math.round(ms / 1000));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h`;
  return count(Math.floor(seconds / 86400), "day");
}

/** How the rows of an agent are, as colour, mark and words. */
const ROWS_ARE = {
  live: ["well", "✓", "live"],
  listing: ["doubt", "…", "is being read"],
  stale: ["doubt", "?", "as it was before"],
  forbidden: ["doubt", "!", "may not be read"],
  absent: ["lost", "✕", "not connected"],
};
const rowsAre = (state) => ROWS_ARE[state] ?? ["doubt", "?", state];

function agentOfPage() {
  const id = /^#agent-(\d{1,19})$/.exec(location.hash);
  return id ? id[1] : null; // a text: it may be larger than a number of JavaScript
}

function link(kind, text) {
  $("link").dataset.link = kind;
  say($("link"), text);
}

// The theme, which is the only thing that is kept beyond the page.

function theme(next) {
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  say($("theme"), `Theme: ${next}`);
}

function remembered() {
  try {
    return localStorage.getItem("kas-theme");
  } catch {
    return null; // storage is off: the choice lasts as long as the page
  }
}

$("theme").addEventListener("click", () => {
  const themes = ["auto", "dark", "light"];
  const next = themes[(themes.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % themes.length];
  theme(next);
  try {
    localStorage.setItem("kas-theme", next);
  } catch {
    // as above
  }
});
document.querySelector(".skip").addEventListener("click", (event) => {
  // The hash says which page is shown.
  event.preventDefault();
  $("content").focus();
});
theme(["dark", "light"].includes(remembered()) ? remembered() : "auto");
