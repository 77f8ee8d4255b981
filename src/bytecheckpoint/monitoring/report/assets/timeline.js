// What one rank did over time: its phases, its single reads and writes, and the phases of a rank of median duration.

// Put rows that overlap below each other. Return the lane of each.
function lanesOf(rows) {
  const ends = [];
  return rows.map((row) => {
    let lane = ends.findIndex((end) => end <= row.begin + 1e-6);
    if (lane < 0) lane = ends.push(0) - 1;
    ends[lane] = row.begin + row.seconds;
    return lane;
  });
}

function rowsOf(table, place) {
  const rows = [];
  for (let row = table.first[place]; row < table.first[place + 1]; row++) {
    rows.push({
      name: table.name.values[table.name.codes[row]], begin: table.begin[row], seconds: table.seconds[row], failed: table.failed[row] === 1,
      nbytes: table.nbytes ? table.nbytes[row] : 0, subject: table.subject ? table.subject.values[table.subject.codes[row]] : "",
    });
  }
  return rows;
}

function showTimeline(detail, rank, operation) {
  const place = detail.places.get(rank);
  const known = place !== undefined;
  const typical = detail.typicalPlace();
  const [phases, spans] = known ? [rowsOf(detail.phases, place), rowsOf(detail.spans, place)] : [[], []];
  find("timeline-title").textContent = known ? `Timeline of rank ${rank}` : "Timeline";
  find("timeline-about").textContent = !known ? `No values of rank ${rank} are in this page.`
    : `${operationTitle(operation)}, ${detail.describe(place)}: ${formatSeconds(detail.seconds[place])}, ${formatSize(detail.nbytes[place])}. ` +
      (typical !== undefined && typical !== place ? `Beside it: rank ${detail.rank[typical]}, which took the median time. ` : "") +
      (spans.length ? `Below the phases: its ${plural(spans.length, "longest span")}.` : "No single spans of this rank are in this page.");
  const lanes = [{ title: `rank ${rank}`, rows: phases }];
  if (typical !== undefined && typical !== place) lanes.push({ title: "median rank", rows: rowsOf(detail.phases, typical) });
  for (const name of new Set(spans.map((span) => span.name))) {
    const rows = spans.filter((span) => span.name === name);
    const lane = lanesOf(rows);
    const depth = Math.min(Math.max(...lane) + 1, 12);
    for (let i = 0; i < depth; i++) lanes.push({ title: i ? "" : name, rows: rows.filter((_, row) => Math.min(lane[row], depth - 1) === i) });
  }
  drawTimeline(lanes);
  fillTable(find("timeline-table"), `Phases and spans of rank ${rank}`, ["What", "Begin>", "Time>", "Bytes>", "File"],
    [...phases, ...spans].map((row) => [row.name + (row.failed ? " (failed)" : ""), formatSeconds(row.begin), formatSeconds(row.seconds),
      row.nbytes ? formatSize(row.nbytes) : "", row.subject]));
}

function drawTimeline(lanes) {
  const node = find("timeline");
  const tall = lanes.filter((lane, i) => i < 2).length;
  node.style.height = `${Math.max(lanes.length * 26 + 66, 110)}px`;
  const style = axisStyle();
  const rows = lanes.flatMap((lane, y) => lane.rows.map((row) => ({ ...row, y })));
  const left = narrow.matches ? 88 : 112;
  const chart = chartOf(node);
  chart.resize();
  chart.setOption({
    ...chartBase(),
    tooltip: { ...chartBase().tooltip, formatter: ({ dataIndex }) => {
      const row = rows[dataIndex];
      return tip(row.name, [`${formatSeconds(row.seconds)}, from ${formatSeconds(row.begin)} on`,
        row.nbytes ? `${formatSize(row.nbytes)}, ${formatRate(row.nbytes / row.seconds)}` : "", row.subject, row.failed ? "failed" : ""].filter(Boolean));
    } },
    grid: { left, right: 18, top: 6, bottom: 46 },
    // With Ctrl, because the wheel alone scrolls the page; what is partly outside stays.
    dataZoom: [{ type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false }],
    xAxis: { ...style, type: "value", min: 0, name: "seconds after the operation began", nameLocation: "middle", nameGap: 28 },
    yAxis: { ...style, type: "category", inverse: true, data: lanes.map((lane) => lane.title), axisTick: { show: false },
      axisLabel: { ...style.axisLabel, interval: 0, width: left - 10, overflow: "truncate" } },
    series: [{
      type: "custom", clip: true, encode: { x: [1, 2], y: 0 }, data: rows.map((row) => [row.y, row.begin, row.begin + row.seconds]),
      renderItem: (_, api) => {
        const row = rows[api.dataIndexInside ?? _.dataIndex];
        const [from, to] = [api.coord([api.value(1), api.value(0)]), api.coord([api.value(2), api.value(0)])];
        const height = row.y < tall ? 20 : 15;
        const fill = colourOf(row.name);
        const width = Math.max(to[0] - from[0], 2);
        return {
          type: "rect", shape: { x: from[0], y: from[1] - height / 2, width, height },
          style: { fill, stroke: row.failed ? colour("text") : colour("card"), lineWidth: row.failed ? 2.5 : width > 4 ? 1 : 0 },
          textContent: width > row.name.length * 7 + 6 ? { style: { text: row.name, fill: textOn(fill), fontSize: 12 } } : undefined,
          textConfig: { position: "inside" },
        };
      },
    }],
  }, true);
}
