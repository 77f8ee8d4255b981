// One value of every rank over two axes of the topology. Ranks that share a place in both lie below each other.

const AXIS_TITLES = { dp: "DP", tp: "TP", pp: "PP", cp: "CP", ep: "EP", host: "host", rank: "rank" };
const BINS = 64;
const MARK = "path://M0,0 L10,10 M10,0 L0,10";

const axesOf = (detail) => [...["dp", "tp", "pp", "cp", "ep"].filter((axis) => axis in detail.axes), "host", "rank"];

// The axes that show the structure best: pipeline stages over replicas, else hosts, else the ranks in order.
function defaultAxes(detail) {
  const several = (axis) => axis in detail.axes && new Set(detail.axes[axis]).size > 1;
  const columns = ["dp", "tp", "ep", "cp"].find(several);
  const rows = ["pp", "tp", "cp", "ep", "dp"].find((axis) => axis !== columns && several(axis));
  if (columns && rows) return [rows, columns];
  return detail.host.values.length > 1 ? ["host", "rank"] : ["rank", "rank"];
}

// Coordinates and labels of an axis; "rank" counts ranks that share the other axis.
function coordinates(detail, axis, other) {
  const count = detail.rank.length;
  if (axis in detail.axes) {
    const values = detail.axes[axis];
    const size = values.reduce((most, value) => Math.max(most, value), -1) + 1;
    const labels = Array.from({ length: size }, (_, i) => `${axis} ${i}`);
    const unknown = values.some((value) => value < 0);
    return { at: Int32Array.from(values, (value) => (value < 0 ? size : value)), labels: unknown ? [...labels, "unknown"] : labels };
  }
  if (axis === "host") return { at: detail.host.codes, labels: detail.host.values.map((host) => host || "no host") };
  const next = new Map();
  const at = Int32Array.from({ length: count }, (_, place) => {
    const group = other[place];
    next.set(group, (next.get(group) ?? -1) + 1);
    return next.get(group);
  });
  return { at, labels: Array.from({ length: at.reduce((most, value) => Math.max(most, value), -1) + 1 }, (_, i) => `${i}`) };
}

// Return where each rank lies: {x, y, labels of both axes, height of a group of rows}.
function layOut(detail, rows, columns) {
  const count = detail.rank.length;
  if (rows === "rank" && columns === "rank") {
    const width = Math.min(count, Math.ceil(Math.sqrt(count * 2.5)));
    const range = (length, step) => Array.from({ length }, (_, i) => `${i * step}`);
    return {
      x: Int32Array.from({ length: count }, (_, i) => i % width), y: Int32Array.from({ length: count }, (_, i) => Math.floor(i / width)),
      xLabels: range(width, 1), yLabels: range(Math.ceil(count / width), width), group: 1,
    };
  }
  let across, down;
  if (columns === "rank") {
    down = coordinates(detail, rows, null);
    across = coordinates(detail, columns, down.at);
  } else {
    across = coordinates(detail, columns, null);
    down = coordinates(detail, rows, across.at);
  }
  const used = new Map();
  const below = Int32Array.from({ length: count }, (_, place) => {
    const cell = down.at[place] * 1e6 + across.at[place];
    used.set(cell, (used.get(cell) ?? -1) + 1);
    return used.get(cell);
  });
  const deepest = below.reduce((most, value) => Math.max(most, value), 0) + 1;
  const group = deepest > 1 ? deepest + 1 : 1; // an empty row parts the groups
  const labels = down.labels.flatMap((label) => [label, ...Array(group - 1).fill("")]);
  return { x: across.at, y: Int32Array.from(down.at, (value, place) => value * group + below[place]), xLabels: across.labels,
    yLabels: group > 1 ? labels.slice(0, -1) : labels, group };
}

class HeatMap {
  constructor(choose) {
    this.node = find("map");
    this.choose = choose;
    this.outline = element("div", { className: "outline", hidden: true });
    this.node.addEventListener("keydown", (event) => this.move(event));
  }

  show(detail, key, rows, columns, chosen, operation) {
    const values = detail.column(key);
    const layout = layOut(detail, rows, columns);
    const rowCount = layout.yLabels.length;
    const wanted = rowCount <= 12 ? rowCount * 34 : Math.max(420, Math.min(rowCount * 5, 560), Math.min(rowCount * 1.5, 1700));
    this.node.style.height = `${wanted + (narrow.matches ? 120 : 100)}px`;
    Object.assign(this, { detail, key, layout, values, at: new Map() });
    const cells = [], failed = [], missing = [];
    let low = Infinity, high = -Infinity;
    for (let place = 0; place < values.length; place++) {
      const cell = [layout.x[place], layout.y[place], values[place], place];
      this.at.set(cell[1] * 1e6 + cell[0], place);
      if (detail.state[place] === 2) { missing.push(cell); continue; }
      if (detail.state[place] === 1) failed.push(cell);
      cells.push(cell);
      low = Math.min(low, values[place]);
      high = Math.max(high, values[place]);
    }
    const stragglers = operation.stragglers
      .map(([rank]) => detail.places.get(rank)).filter((place) => place !== undefined)
      .map((place) => [layout.x[place], layout.y[place], values[place], place]);
    // Cells of about the same value are one shape: thousands of shapes would take the library a second.
    const bins = new Map();
    for (const cell of cells) {
      const bin = high > low ? Math.min(Math.floor(((cell[2] - low) / (high - low)) * BINS), BINS - 1) : 0;
      if (!bins.has(bin)) bins.set(bin, []);
      bins.get(bin).push(cell);
    }
    this.draw(bins, cells.length < 600 ? 1 : 0, failed, missing, stragglers, low, high);
    this.mark(chosen);
    find("map-legend").replaceChildren(...[
      stragglers.length ? [element("b", {}, "○"), " straggler"] : null,
      failed.length ? [element("b", {}, "×"), " failed"] : null,
      missing.length ? [element("b", {}, "□"), " no report"] : null,
      [element("b", {}, "▣"), " chosen rank"],
      layout.group > 1 ? [`ranks with the same ${AXIS_TITLES[rows]} and ${AXIS_TITLES[columns]} lie below each other`] : null,
    ].filter(Boolean).map((parts) => element("span", {}, ...parts)));
  }

  format(value) {
    return this.key === "nbytes" ? formatSize(value) : formatSeconds(value);
  }

  draw(bins, gap, failed, missing, stragglers, low, high) {
    const style = axisStyle();
    const { layout, detail } = this;
    const left = Math.min(12 + 7 * layout.yLabels.reduce((most, label) => Math.max(most, label.length), 0), narrow.matches ? 80 : 150);
    this.left = left;
    const every = Math.ceil(layout.yLabels.length / layout.group / 18) * layout.group;
    const large = gap > 0;
    const axis = { ...style, type: "category", splitLine: { show: false }, axisTick: { show: false } };
    const marks = (id, data, symbol, look) => ({
      id, type: "scatter", data, symbol, symbolSize: large ? 12 : 7, itemStyle: look, zlevel: 1, encode: { x: 0, y: 1 }, dimensions: ["x", "y", "value", "place"],
    });
    const first = !this.chart;
    this.chart = chartOf(this.node, () => this.mark(this.rank));
    if (first) this.listen(this.chart.getZr());
    this.node.append(this.outline);
    // When the first map is on the screen, in milliseconds: tests read it.
    requestAnimationFrame(() => setTimeout(() => (document.documentElement.dataset.drawn ??= String(Math.round(performance.now())))));
    this.chart.resize();
    this.chart.setOption({
      ...chartBase(),
      tooltip: { ...chartBase().tooltip, transitionDuration: 0, formatter: () => (this.under === undefined ? "" :
        tip(`rank ${detail.rank[this.under]}`, [this.words(this.under), detail.describe(this.under)])) },
      grid: { left, right: 12, top: 8, bottom: narrow.matches ? 96 : 82 },
      xAxis: { ...axis, data: layout.xLabels, axisLabel: { ...style.axisLabel, hideOverlap: true } },
      yAxis: { ...axis, data: layout.yLabels, inverse: true,
        axisLabel: { ...style.axisLabel, interval: (place) => place % every === 0, width: left - 8, overflow: "truncate" } },
      visualMap: {
        min: low === high ? low * 0.9 : low, max: high > 0 ? high : 1, calculable: true, orient: "horizontal", left: "center", bottom: 0,
        itemWidth: 14, itemHeight: narrow.matches ? 130 : 220, inRange: { color: VIRIDIS }, dimension: 2, seriesIndex: 0,
        textStyle: { color: colour("text"), fontSize: 12 }, formatter: (value) => this.format(value),
      },
      series: [
        { id: "cells", type: "custom", data: [...bins.keys()].map((bin) => [0, 0, low + ((bin + 0.5) / BINS) * (high - low), bin]),
          encode: { x: 0, y: 1, value: 2 }, renderItem: (_, api) => this.shape(bins.get(api.value(3)), gap, api) },
        { ...marks("missing", missing, "rect", { color: "transparent", borderColor: colour("text"), borderWidth: 1.5 }), symbolSize: large ? 16 : 7 },
        marks("failed", failed, MARK, { color: "transparent", borderColor: "#ffffff", borderWidth: 2.5, shadowColor: "#000000", shadowBlur: 3 }),
        marks("stragglers", stragglers, "circle", { color: "transparent", borderColor: "#ffffff", borderWidth: 1.5, shadowColor: "#000000", shadowBlur: 3 }),
      ],
    }, true);
  }

  // Before the chart listens itself: its tip is of the rank under the pointer.
  listen(canvas) {
    canvas.on("mousemove", (event) => (this.under = this.placeAt(event)));
    canvas.on("click", (event) => {
      const place = this.placeAt(event);
      if (place !== undefined) this.choose({ rank: this.detail.rank[place] });
    });
  }

  // The rank's row under the pointer, if there is one.
  placeAt({ offsetX, offsetY }) {
    if (!this.chart.containPixel({ gridIndex: 0 }, [offsetX, offsetY])) return undefined;
    const [x, y] = this.chart.convertFromPixel({ gridIndex: 0 }, [offsetX, offsetY]);
    return this.at.get(y * 1e6 + x);
  }

  // All cells of one colour as one shape.
  shape(cells, gap, api) {
    const [left, top] = api.coord([0, 0]);
    const [width, height] = api.size([1, 1]);
    const box = `h${width + 0.4 - gap}v${height + 0.4 - gap}h${-(width + 0.4 - gap)}z`;
    const at = (cell) => `M${left + (cell[0] - 0.5) * width + gap / 2} ${top + (cell[1] - 0.5) * height + gap / 2}`;
    return { type: "path", shape: { pathData: cells.map((cell) => at(cell) + box).join("") }, style: { fill: api.visual("color") }, emphasis: { disabled: true } };
  }

  words(place) {
    const state = ["", ", failed", ", no report"][this.detail.state[place]];
    return `${this.format(this.values[place])}${state}`;
  }

  // Outline the chosen rank. An element above the chart: the chart would draw all its cells again.
  mark(rank) {
    const place = this.detail.places.get(rank);
    this.place = place;
    this.rank = rank;
    this.outline.hidden = place === undefined;
    if (place === undefined) return;
    const [x, y] = [this.layout.x[place], this.layout.y[place]];
    const step = (at, count) => (at + 1 < count ? 1 : at > 0 ? -1 : 0); // to a neighbour
    const [dx, dy] = [step(x, this.layout.xLabels.length), step(y, this.layout.yLabels.length)];
    const pixel = (at) => this.chart.convertToPixel({ gridIndex: 0 }, at);
    const [here, next] = [pixel([x, y]), pixel([x + dx, y + dy])];
    const width = Math.max(dx ? Math.abs(next[0] - here[0]) : this.chart.getWidth() - this.left - 12, 8);
    const height = Math.max(dy ? Math.abs(next[1] - here[1]) : 34, 8);
    Object.assign(this.outline.style, { width: `${width + 4}px`, height: `${height + 4}px`, left: `${here[0] - width / 2 - 2}px`, top: `${here[1] - height / 2 - 2}px` });
    const what = `rank ${rank}, ${this.detail.describe(place)}: ${this.words(place)}`;
    this.node.setAttribute("aria-label", `Heat map over ${formatCount(this.values.length)} ranks. Chosen: ${what}`);
    find("announce").textContent = what;
  }

  move(event) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!this.detail || event.altKey || event.ctrlKey || event.metaKey || (!steps && event.key !== "Home")) return;
    event.preventDefault();
    let place;
    if (steps) {
      let [x, y] = [this.layout.x[this.place ?? 0], this.layout.y[this.place ?? 0]];
      for (let tries = 0; tries < 2000 && place === undefined; tries++) {
        [x, y] = [x + steps[0], y + steps[1]];
        if (x < 0 || y < 0 || x >= this.layout.xLabels.length || y >= this.layout.yLabels.length) return;
        place = this.at.get(y * 1e6 + x);
      }
    } else {
      place = this.values.reduce((best, value, candidate) => (value > this.values[best] ? candidate : best), 0);
    }
    if (place !== undefined) this.choose({ rank: this.detail.rank[place] });
  }
}

function showSlowest(detail, key, chosen, choose) {
  const values = detail.column(key);
  const format = key === "nbytes" ? formatSize : formatSeconds;
  find("slowest-title").textContent = key === "nbytes" ? "Most bytes" : "Slowest ranks";
  const places = [...values.keys()].filter((place) => detail.state[place] < 2).sort((a, b) => values[b] - values[a]).slice(0, 10);
  const table = find("slowest");
  fillTable(table, "Ranks with the highest values", ["Rank", "Where", "Value>"], places.map((place) =>
    [rankButton(detail.rank[place], (rank) => choose({ rank })), detail.describe(place), format(values[place])]));
  [...table.tBodies[0].rows].forEach((row, i) => row.setAttribute("aria-selected", String(detail.rank[places[i]] === chosen)));
}
