// What is chosen, and which part of the page follows from it.

const state = { data: null, operation: null, value: null, rows: null, columns: null, rank: null, kind: null };
const details = new Map();
const heatMap = new HeatMap((change) => choose(change));

function detailOf(operation) {
  if (!details.has(operation.id)) details.set(operation.id, new Detail(state.data.details[operation.id]));
  return details.get(operation.id);
}

// The operation and rank that somebody who opens the page should see first.
function firstChoice(data) {
  const shown = data.operations.filter((operation) => operation.id in data.details);
  const saves = shown.filter((operation) => operation.kind === "save");
  return (saves.length ? saves : shown).at(-1) || null;
}

// Change what is chosen: operation (id), value, rows, columns, rank, kind; `scroll` shows the timeline.
function choose(change) {
  const { data } = state;
  const other = change.operation !== undefined && change.operation !== state.operation?.id;
  if (change.operation !== undefined) state.operation = data.operations.find((operation) => operation.id === change.operation);
  for (const name of ["value", "rows", "columns", "rank", "kind"]) if (change[name] !== undefined) state[name] = change[name];
  const { operation } = state;
  if (!operation) return;
  if (other) {
    state.kind = operation.kind;
    showTiles(operation);
    showPhases(operation, choose);
    showStragglers(operation, choose);
  }
  const has = operation.id in data.details;
  find("map-split").hidden = find("timeline").hidden = !has;
  find("map-none").hidden = has;
  find("map-none").textContent = `Values of every rank of ${operationTitle(operation)} are not in this page; those of the newest operations are.`;
  if (has) showRanks(operation, other, change);
  if (other || change.kind) {
    fillSelect(find("kind"), [...new Set(data.operations.map((one) => one.kind))].map((kind) => [kind, `${kind}s`]), state.kind);
    later("history", () => showHistory(data, state.kind, operation.kind === state.kind ? operation : null, choose));
  }
  if (change.scroll) find("map-title").scrollIntoView({ block: "start" });
}

// Draw after the heat map, which people wait for; only the newest of two drawings of one chart.
const waiting = new Map();
function later(name, draw) {
  clearTimeout(waiting.get(name));
  waiting.set(name, setTimeout(draw, 0));
}

function showRanks(operation, other, change) {
  const detail = detailOf(operation);
  if (other) {
    const values = detail.values();
    const worst = operation.stragglers[0];
    if (!values.some(([key]) => key === state.value)) state.value = worst ? `phase:${worst[2]}` : operation.ownPhase ? `phase:${operation.ownPhase}` : "seconds";
    if (!axesOf(detail).includes(state.rows) || !axesOf(detail).includes(state.columns)) [state.rows, state.columns] = defaultAxes(detail);
    if (change.rank === undefined && !change.keep) state.rank = operation.cause ?? worst?.[0] ?? slowestRank(detail, state.value);
    const shown = state.data.operations.filter((one) => one.id in state.data.details).reverse();
    fillSelect(find("operation"), shown.map((one) => [one.id, `${operationTitle(one)}, ${formatTime(one.began).slice(0, 16)}`]), operation.id);
    fillSelect(find("value"), values, state.value);
    const axes = axesOf(detail).map((axis) => [axis, AXIS_TITLES[axis]]);
    fillSelect(find("rows"), axes, state.rows);
    fillSelect(find("columns"), axes, state.columns);
  }
  find("operation").value = operation.id;
  find("value").value = state.value;
  find("rank").value = state.rank;
  find("rank").max = operation.worldSize - 1;
  const onlyRank = !other && Object.keys(change).every((name) => name === "rank" || name === "scroll");
  if (onlyRank) heatMap.mark(state.rank);
  else heatMap.show(detail, state.value, state.rows, state.columns, state.rank, operation);
  showSlowest(detail, state.value, state.rank, choose);
  later("timeline", () => showTimeline(detail, state.rank, operation));
}

function slowestRank(detail, key) {
  const values = detail.column(key);
  return detail.rank[values.reduce((best, value, place) => (value > values[best] ? place : best), 0)];
}

function showData(data) {
  const kept = state.operation && data.operations.some((operation) => operation.id === state.operation.id) && !following() ? state.operation : firstChoice(data);
  Object.assign(state, { data, operation: null });
  details.clear();
  find("run").textContent = `${data.root}, read ${formatTime(data.made)}`;
  document.title = `Checkpoint report: ${data.root}`;
  find("simulated").hidden = !data.simulated;
  find("words").replaceChildren(...data.words.map((sentence) => element("p", {}, sentence)));
  showFindings(data, choose);
  showAlerts(data, choose);
  const skipped = data.skipped ? [`${plural(data.skipped, "file")} could not be read as metrics and ${data.skipped === 1 ? "was" : "were"} skipped.`] : [];
  find("about").replaceChildren(...[...data.leftOut, ...skipped, "Charts: Apache ECharts (Apache License 2.0)."].map((text) => element("p", {}, text)));
  const none = !data.operations.length;
  for (const section of document.querySelectorAll("main > section.card:not(#live, #findings)")) section.hidden = none;
  if (!none) choose({ operation: (kept || data.operations.at(-1)).id });
}

// Whether the newest operation is looked at: the page of a monitor then goes on to newer ones.
const following = () => state.operation !== null && state.operation === firstChoice(state.data);

function start() {
  for (const name of ["operation", "value", "rows", "columns", "kind"])
    find(name).addEventListener("change", (event) => choose({ [name]: event.target.value }));
  find("rank").addEventListener("change", (event) => {
    if (event.target.value !== "") choose({ rank: Number(event.target.value) });
  });
  find("controls").addEventListener("submit", (event) => event.preventDefault());
  const redraw = () => {
    const { operation } = state;
    state.operation = null;
    if (operation) choose({ operation: operation.id, keep: true });
  };
  dark.addEventListener("change", redraw);
  narrow.addEventListener("change", redraw);
  const holder = find("data");
  const data = JSON.parse(holder.textContent);
  if (data) showData(data);
  if (holder.dataset.live === "true") follow(showData);
}

start();
