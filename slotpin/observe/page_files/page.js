"use strict";

const KEPT = 1000;
const BARS = 60;
const LISTED = 12;
const NOWHERE = ["refused", "unreachable"];
// As in page.css: there the plot's text is larger, since the plot is drawn smaller.
const NARROW = matchMedia("(max-width: 700px)");
const SVG = "http://www.w3.org/2000/svg";
const records = [];
let lastBoard = null;

const at = (id) => document.getElementById(id);

/** An element with attributes and children; text is never read as markup. */
function make(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "line", "text", "title"].includes(name);
  const element = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

const count = (value) => (value == null ? "–" : value.toLocaleString("en"));
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");
const time = (unix) => new Date(1000 * unix).toLocaleTimeString([], { hourCycle: "h23" });

function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const two = (value) => String(value).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

const named = (record) => (record.conversation ? `${record.client} ${record.conversation}` : record.client);

function cell(text, kind) {
  return make("td", kind ? { class: kind } : {}, text);
}

function showBoard(board) {
  // Another slotpin than the one whose records are shown.
  if (lastBoard && board.started !== lastBoard.started) return location.reload();
  lastBoard = board;
  const mode = board.mode === false ? "off: nothing is pinned" : String(board.mode);
  at("lost").textContent = "";
  at("about").textContent =
    `${board.version} in front of ${board.upstream}, pinning ${mode}, up ${duration(board.uptimeSeconds)}`;
  at("t-cached").textContent =
    `${count(board.totals.cached)} (${percent(board.totals.cached, board.totals.cached + board.totals.evaluated)})`;
  at("t-evaluated").textContent = count(board.totals.evaluated);
  at("t-spared").textContent = duration(board.totals.sparedSeconds);
  at("t-exchanges").textContent = count(board.totals.exchanges);
  at("t-refused").textContent = count(board.totals.refused);
  at("warnings").hidden = board.warnings.length === 0;
  replace(at("warning-list"), board.warnings.map((warned) =>
    make("li", {}, `${warned.cause}: ${warned.message}${warned.count > 1 ? ` (${warned.count} times)` : ""}`)));
  if (board.slots.length) replace(at("slots"), board.slots.map(slotRow));
}

/** Only what has changed is replaced, so that a screen reader and a selection are left in peace. */
function replace(parent, children) {
  const fresh = make(parent.localName, {}, ...children);
  if (fresh.innerHTML !== parent.innerHTML) parent.replaceChildren(...fresh.childNodes);
}

function slotRow(slot) {
  const running = lastBoard.underWay.find((record) => record.id === slot.running);
  const state = running ? `busy ${duration(Math.floor(running.seconds))}` : slot.busy ? "busy" : "idle";
  const held = slot.tokens == null ? (running ? "…" : "–") : count(slot.tokens);
  return make("tr", {},
    make("th", { scope: "row" }, slot.model ? `${slot.model} ${slot.id}` : slot.id),
    cell(slot.role === null ? "–" : named(slot), "mono"),
    cell(slot.role ?? "–"),
    cell(state),
    cell(slot.n_ctx ? `${held} of ${count(slot.n_ctx)}` : held, "number"),
    make("td", {}, spark(slot.reused)),
    cell(slot.waiting || "–", "number"));
}

function spark(shares) {
  if (!shares.length) return make("span", {}, "–");
  const last = shares[shares.length - 1];
  const label = `re-used of the last turns, in percent: ${shares.join(", ")}`;
  const bars = shares.flatMap((share, place) => [
    make("rect", { class: "base", x: 6 * place, y: 19, width: 5, height: 1 }),
    make("rect", { x: 6 * place, y: 20 - share / 5, width: 5, height: share / 5 })]);
  const drawn = make("svg", { class: "spark", width: 6 * shares.length, height: 20, role: "img", "aria-label": label }, ...bars);
  return make("span", {}, drawn, `${last}%`);
}

function latestRow(record) {
  const known = record.cached != null;
  return make("tr", {},
    cell(time(record.arrived)),
    make("th", { scope: "row", class: "mono" }, record.id),
    cell(record.client),
    cell(record.role),
    cell(NOWHERE.includes(record.outcome) ? "none" : record.slot ?? "any", "number"),
    cell(record.reason),
    cell(known ? count(record.cached) : "–", "number"),
    cell(known ? count(record.evaluated) : "–", "number"),
    cell(record.waited >= 0.01 ? duration(record.waited) : "–", "number"),
    cell(duration(record.seconds), "number"),
    cell(record.outcome.replace("_", " "), record.outcome === "completed" ? "" : "bad"));
}

/** A round number at least as large, for the top of the axis. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 1.2, 1.6, 2, 3, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value);
}

function describe(record) {
  const prompt = record.cached + record.evaluated;
  const lost = record.lost ? `, ${count(record.lost)} lost (${record.cause})` : "";
  return `${time(record.arrived)} ${record.role} of ${named(record)}: ${count(record.cached)} of ${count(prompt)} re-used ` +
    `(${percent(record.cached, prompt)}), ${count(record.evaluated)} evaluated${lost}; request ${record.id}`;
}

function showPlot() {
  const which = at("which").value;
  const shown = records
    .filter((record) => record.cached != null && (!which || record.conversation === which || record.role === which))
    .slice(-BARS);
  const left = NARROW.matches ? 118 : 64;
  const [top, width, height] = [12, 950 - left, 230];
  const most = nice(Math.max(1, ...shown.map((record) => record.cached + record.evaluated)));
  const parts = [0, 0.25, 0.5, 0.75, 1].flatMap((share) => {
    const y = top + height * (1 - share);
    return [make("line", { class: "grid", x1: left, x2: left + width, y1: y, y2: y }),
      make("text", { x: left - 8, y: y + (NARROW.matches ? 8 : 4), "text-anchor": "end" }, count(Math.round(most * share)))];
  });
  const step = width / Math.max(shown.length, 20);
  const focused = document.activeElement?.dataset?.request;
  const bars = shown.map((record, place) => {
    const cached = (height * record.cached) / most;
    const evaluated = (height * record.evaluated) / most;
    const x = left + place * step;
    const bar = { x: x + 0.15 * step, width: 0.7 * step };
    const text = describe(record);
    return make("g", { class: "bar", role: "img", tabindex: -1, "aria-label": text, "data-request": record.id },
      make("rect", { class: "hit", x, y: top, width: step, height }),
      make("rect", { class: "cached", ...bar, y: top + height - cached, height: cached }),
      make("rect", { class: "evaluated", ...bar, y: top + height - cached - evaluated, height: evaluated }));
  });
  if (bars.length) {
    const ends = [shown[0], shown[shown.length - 1]].map((record) => time(record.arrived));
    parts.push(make("text", { x: left, y: 266 }, ends[0]));
    if (bars.length > 4) parts.push(make("text", { x: left + bars.length * step, y: 266, "text-anchor": "end" }, ends[1]));
    (bars.find((bar) => bar.dataset.request === focused) ?? bars[bars.length - 1]).setAttribute("tabindex", 0);
  } else {
    parts.push(make("text", { x: left + width / 2, y: top + height / 2, "text-anchor": "middle" }, "no turn yet"));
  }
  at("plot").replaceChildren(...parts, ...bars);
  if (focused) at("plot").querySelector(`[data-request="${focused}"]`)?.focus();
}

function showChoices() {
  const choices = [["", "all requests"], ["main", "main requests"], ["compactor", "side requests"]];
  const known = new Map(records.filter((record) => record.conversation && record.role === "main")
    .map((record) => [record.conversation, `conversation ${named(record)}`]));
  const before = at("which").value;
  const options = [...choices, ...known].map(([value, text]) => make("option", { value }, text));
  if (options.length === at("which").length) return;
  at("which").replaceChildren(...options);
  at("which").value = options.some((option) => option.value === before) ? before : "";
}

function showRecords() {
  if (records.length) at("latest").replaceChildren(...records.slice(-LISTED).reverse().map(latestRow));
  showChoices();
  showPlot();
}

function pick(event) {
  const bar = event.target.closest(".bar");
  if (bar) at("picked").textContent = bar.getAttribute("aria-label");
}

function step(event) {
  const bars = [...at("plot").querySelectorAll(".bar")];
  const place = bars.indexOf(event.target.closest(".bar"));
  const next = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: bars.length - 1 }[event.key];
  if (place < 0 || next === undefined || !bars[next]) return;
  event.preventDefault();
  bars[place].setAttribute("tabindex", -1);
  bars[next].setAttribute("tabindex", 0);
  bars[next].focus();
}

at("plot").addEventListener("pointerover", pick);
at("plot").addEventListener("focusin", pick);
at("plot").addEventListener("keydown", step);
at("which").addEventListener("change", showPlot);
NARROW.addEventListener("change", showPlot);
showPlot();

let due = false;
const events = new EventSource("/slotpin/events");
events.addEventListener("exchange", (event) => {
  records.push(JSON.parse(event.data));
  if (records.length > KEPT) records.shift();
  if (due) return;
  due = true;
  requestAnimationFrame(() => { due = false; showRecords(); });
});
events.addEventListener("board", (event) => showBoard(JSON.parse(event.data)));
events.addEventListener("error", () => {
  at("lost").textContent = "slotpin does not answer; trying again";
});
