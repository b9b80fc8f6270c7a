// The page's data, the view that its address names, and the filters that change the view.
//
// A view is in the address's hash, so that it can be linked to: `#task=needles&budget=0.25`
// filters, `#question=3` opens a question. Without scripts the page shows the leaderboard of all
// answers.
"use strict";

// An error stands in the page too, where a test looks.
addEventListener("error", (event) => {
  document.documentElement.dataset.error = event.message;
});

/** An element. Texts become text nodes, never HTML. */
function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** Three significant digits, whole numbers in full with their thousands apart. */
function significant(value) {
  if (value === 0) return "0";
  return value >= 999.5 ? Math.round(value).toLocaleString("en") : value.toPrecision(3);
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 999.5) return `${significant(value)} ${unit}`;
    value /= 1024;
  }
  return `${significant(value)} TiB`;
}

/** A number as text, or a dash where there is none. */
function known(value, write) {
  return Number.isFinite(value) ? write(value) : "–";
}

/** The upper end of a power of two's range of lengths, in tokens. */
function bucket(length) {
  return 2 ** Math.ceil(Math.log2(Math.max(length, 1)));
}

let view = {};

function readView() {
  const hash = location.hash.slice(1);
  if (hash === "" || hash === "all") view = {};
  // Other hashes are anchors of the page, which leave the view as it is.
  if (hash.includes("=")) view = Object.fromEntries(new URLSearchParams(hash));
}

/** The hash of this view with some changes; null leaves something out. */
function hashOf(changes) {
  const entries = Object.entries({ ...view, ...changes });
  const text = new URLSearchParams(entries.filter(([, value]) => value)).toString();
  return `#${text || "all"}`;
}

function go(changes) {
  location.hash = hashOf(changes);
}

/** Whether the view shows a setup, by its family and budget. The full cache always stays. */
function showsSetup(setup) {
  if (setup.full) return true;
  const family = !view.family || setup.family === view.family;
  return family && (!view.budget || String(setup.budget) === view.budget);
}

/** Whether the view shows a question, by its task and length. */
function showsQuestion(task, length) {
  return (!view.task || task === view.task)
    && (!view.length || String(bucket(length)) === view.length);
}

function showsMode(mode) {
  return !view.mode || mode === view.mode;
}

/** What filters offer: name, label, and values with their texts. */
function choices(data) {
  const others = data.setups.filter((setup) => !setup.full);
  const lengths = data.questions.map(([, , length]) => bucket(length)).sort((a, b) => a - b);
  const budgets = others.filter((setup) => setup.budget !== null)
    .sort((a, b) => b.budget - a.budget);
  const same = (value) => [String(value), String(value)];
  return [
    ["budget", "Budget", budgets.map((setup) => [String(setup.budget), setup.label])],
    ["family", "Family", others.map((setup) => same(setup.family))],
    ["task", "Task", data.tasks.map(same)],
    ["length", "Prompt", lengths.map((end) => [String(end), `${end / 2 + 1} to ${end} tokens`])],
    ["mode", "Mode", data.modes.map(same)],
  ];
}

/** Fills a form with a filter for all that there are several of. Returns what shows the view. */
function filters(form, data) {
  const selects = [];
  for (const [name, label, values] of choices(data)) {
    const unique = new Map(values);
    if (unique.size < 2) continue;
    const options = [["", "all"], ...unique]
      .map(([value, text]) => element("option", { value }, text));
    const select = element("select", { name }, ...options);
    select.addEventListener("change", () => go({ [name]: select.value }));
    form.append(element("label", {}, label, select));
    selects.push(select);
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  // The search has a field of its own.
  form.hidden = form.childElementCount === 0;
  return () => selects.forEach((select) => (select.value = view[select.name] ?? ""));
}

addEventListener("DOMContentLoaded", () => {
  const shows = [];
  for (const root of document.querySelectorAll(".evaluation")) {
    const data = JSON.parse(root.querySelector(".data").textContent);
    shows.push(leaderboard(root, data), questions(root, data));
    for (const form of root.querySelectorAll(".filters")) shows.push(filters(form, data));
  }
  const show = () => {
    readView();
    shows.forEach((each) => each());
  };
  addEventListener("hashchange", show);
  show();
  document.documentElement.dataset.ready = "true";
});

