// How operations of one kind went over the run: phases, the whole, blocking, bandwidth.

function showHistory(data, kind, chosen, choose) {
  const operations = data.operations.filter((operation) => operation.kind === kind);
  const names = [...new Set(operations.flatMap((operation) => operation.phases.map((phase) => phase[0])))];
  const titles = operations.map((operation) => (operation.step === null ? formatTime(operation.began).slice(5, 16) : `${operation.step}`));
  const node = find("history");
  node.style.height = narrow.matches ? "430px" : "400px";
  const style = axisStyle();
  const grid = { left: 64, right: 14 };
  const seconds = { ...style, type: "value", name: "seconds", nameGap: 10, min: 0 };
  const line = (name, values, symbol, tint) => ({
    name, type: "line", data: values, symbol, symbolSize: 7, showSymbol: operations.length <= 60,
    lineStyle: { width: 2, color: tint }, itemStyle: { color: tint }, z: 5,
  });
  // What everybody waited for: these times add up to the whole.
  const phaseOf = (operation, name) => operation.critical.reduce((sum, [phase, , , time]) => (phase === name ? sum + time : sum), 0);
  const fastest = Math.max(...operations.map((operation) => operation.bandwidth || 0), 1);
  const unit = Math.min(Math.floor(Math.log2(fastest) / 10), UNITS.length - 1);
  const chart = chartOf(node);
  chart.setOption({
    ...chartBase(),
    legend: { top: 0, data: [...names, "whole, slowest rank", "blocking", "bandwidth", "not done"], type: "scroll", textStyle: { color: colour("text"), fontSize: 12 }, pageTextStyle: { color: colour("text") }, pageIconColor: colour("text"), itemHeight: 9, itemWidth: 16 },
    tooltip: { ...chartBase().tooltip, trigger: "axis", axisPointer: { type: "shadow" }, formatter: (points) => {
      const operation = operations[points[0].dataIndex];
      return tip(operationTitle(operation), [
        `${formatSeconds(operation.seconds)} in all, ${formatSeconds(operation.blocking)} blocking`,
        `${formatRate(operation.bandwidth)}, ${formatSize(operation.nbytes)}`,
        ...operation.phases.map(([name, middle, longest]) => `${name}: median ${formatSeconds(middle)}, longest ${formatSeconds(longest)}`),
        operation.state === "done" ? "" : operation.state,
      ]);
    } },
    axisPointer: { link: [{ xAxisIndex: "all" }] },
    // With Ctrl, because the wheel alone scrolls the page.
    dataZoom: [{ type: "inside", xAxisIndex: [0, 1], zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false },
      { type: "slider", xAxisIndex: [0, 1], height: 16, bottom: 4, show: operations.length > 30 }],
    grid: [{ ...grid, top: 62, height: "50%" }, { ...grid, top: "76%", bottom: operations.length > 30 ? 54 : 34 }],
    xAxis: [0, 1].map((gridIndex) => ({
      ...style, gridIndex, type: "category", data: titles, axisLabel: { ...style.axisLabel, show: gridIndex === 1, hideOverlap: true },
    })),
    yAxis: [seconds, { ...style, type: "value", gridIndex: 1, name: `${UNITS[unit]}/s`, nameGap: 10, min: 0, splitNumber: 2 }],
    series: [
      ...names.map((name) => ({
        name, type: "bar", stack: "phases", barMaxWidth: 38, data: operations.map((operation) => phaseOf(operation, name)),
        itemStyle: { color: colourOf(name) },
      })),
      line("whole, slowest rank", operations.map((operation) => operation.seconds), "circle", colour("text")),
      line("blocking", operations.map((operation) => operation.blocking), "triangle", colour("serious")),
      { ...line("bandwidth", operations.map((operation) => (operation.bandwidth || 0) / 1024 ** unit), "rect", colour("accent")), xAxisIndex: 1, yAxisIndex: 1 },
      { name: "not done", type: "scatter", symbol: "diamond", symbolSize: 13, z: 6, itemStyle: { color: colour("serious") },
        data: operations.map((operation) => (operation.state === "done" ? null : operation.seconds)) },
      { id: "chosen", type: "line", data: [], markLine: { silent: true, symbol: "none", label: { show: false },
        lineStyle: { color: colour("accent"), type: "dashed", width: 2 }, data: chosen ? [{ xAxis: operations.indexOf(chosen) }] : [] } },
    ],
  }, true);
  chart.off("click");
  chart.getZr().off("click");
  chart.getZr().on("click", (event) => {
    const point = chart.convertFromPixel({ gridIndex: 0 }, [event.offsetX, event.offsetY]);
    const operation = point && operations[Math.round(point[0])];
    if (operation && event.offsetY > 50) choose({ operation: operation.id });
  });
  fillTable(find("history-table"), "Operations of the run", ["Operation", "Began", "Result", "Whole>", "Blocking>", "Bandwidth>", "Bytes>", "Retries>"],
    [...operations].reverse().map((operation) => [
      element("button", { type: "button", onclick: () => choose({ operation: operation.id }) }, operationTitle(operation)),
      formatTime(operation.began), operation.state, formatSeconds(operation.seconds), formatSeconds(operation.blocking),
      formatRate(operation.bandwidth), formatSize(operation.nbytes), formatCount(operation.retries),
    ]));
}
