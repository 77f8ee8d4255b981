// Numbers for people, and elements that hold text: no text of a run ever becomes markup.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function formatSize(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  let unit = 0;
  for (; bytes >= 1024 && unit < UNITS.length - 1; unit++) bytes /= 1024;
  return `${unit ? bytes.toFixed(1) : Math.round(bytes)} ${UNITS[unit]}`;
}

const formatRate = (bytes) => (bytes ? `${formatSize(bytes)}/s` : "–");
const formatCount = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, ",");

function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const minutes = Math.round(seconds / 60);
  if (minutes >= 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  if (seconds >= 100) return `${Math.round(seconds)} s`;
  if (seconds >= 1) return `${seconds.toFixed(seconds >= 10 ? 1 : 2)} s`;
  if (seconds >= 0.001) return `${(seconds * 1000).toFixed(seconds >= 0.1 ? 0 : 1)} ms`;
  return seconds > 0 ? `${Math.round(seconds * 1e6)} µs` : "0 s";
}

const formatTime = (epoch) => new Date(epoch * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";
const plural = (count, one) => `${formatCount(count)} ${one}${count === 1 ? "" : "s"}`;

function operationTitle(operation) {
  const name = operation.path.replace(/\/+$/, "").split("/").pop();
  return `${operation.kind} ${operation.step === null ? name : `step ${formatCount(operation.step)}`}`;
}

const find = (id) => document.getElementById(id);

// element("td", {className: "right"}, "text", otherElement)
function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// Titles that end in ">" align to the right. A row is an array of texts or elements.
function fillTable(table, caption, titles, rows) {
  const right = titles.map((title) => title.endsWith(">"));
  const cell = (name, text, place) => element(name, right[place] ? { className: "right" } : {}, text);
  const head = titles.map((title, place) => cell("th", title.replace(/>$/, ""), place));
  head.forEach((th) => (th.scope = "col"));
  table.replaceChildren(
    element("caption", { className: "hidden" }, caption),
    element("thead", {}, element("tr", {}, ...head)),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((text, place) => cell("td", text, place)))))
  );
}

function rankButton(rank, choose) {
  return element("button", { type: "button", onclick: () => choose(rank) }, `rank ${rank}`);
}

function tip(title, lines) {
  return element("div", { className: "tip" }, element("b", {}, title), ...lines.map((line) => element("div", {}, line)));
}

function fillSelect(select, options, chosen) {
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  select.value = options.some(([value]) => value === chosen) ? chosen : options.length ? options[0][0] : "";
}
