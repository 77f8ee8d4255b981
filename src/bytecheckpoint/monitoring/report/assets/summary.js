// The chosen operation in figures and words: tiles, findings, phases, stragglers.

const SEVERITIES = {
  critical: ["serious", "Critical"],
  warning: ["warning", "Warning"], info: ["info", "Note"],
};

function tile(title, value, note) {
  return element("dl", { className: "tile" }, element("dt", {}, title), element("dd", {}, value, element("small", {}, note)));
}

function showTiles(operation) {
  const troubles = operation.failureCount + operation.missingCount;
  const started = `${plural(operation.worldSize, "rank")} on ${plural(operation.hosts, "host")}`;
  find("summary").replaceChildren(
    tile(operation.kind === "save" ? "Save" : "Load", operation.step === null ? operationTitle(operation) : `step ${formatCount(operation.step)}`, started),
    tile("Whole operation", formatSeconds(operation.seconds), "the slowest rank"),
    tile("Blocking", formatSeconds(operation.blocking), "the caller waited, at most"),
    tile("Bandwidth", formatRate(operation.bandwidth), `${formatSize(operation.nbytes)} in all`),
    tile("Retries", formatCount(operation.retries), operation.retries ? `${formatSeconds(operation.retrySeconds)} waited` : "none was needed"),
    tile("Result", operation.state, troubles
      ? `${formatCount(operation.failureCount)} failed, ${formatCount(operation.missingCount)} without a report`
      : `${plural(operation.stragglerCount, "straggler")}`)
  );
}

function showFindings(data, choose) {
  const body = find("findings-body");
  const isOver = (finding) => finding.episode !== null && finding.episode.ended !== null;
  const now = data.findings.filter((finding) => !isOver(finding)).map((finding) => showFinding(finding, data, choose));
  const over = data.findings.filter(isOver).map((finding) => showFinding(finding, data, choose));
  if (!now.length) {
    const text = data.operations.length
      ? "Nothing stands out now: no failures, no stragglers, no retries, and no save much slower than those before it."
      : "There are no metrics of this run yet.";
    now.push(element("div", { className: "finding fine" }, element("p", {}, text)));
  }
  const history = element("details", {}, element("summary", {}, `${plural(over.length, "finding")} about what is over`), ...over);
  body.replaceChildren(...now, ...(over.length ? [history] : []));
}

function showFinding(finding, data, choose) {
  const [kind, word] = SEVERITIES[finding.severity] || ["info", "Note"];
  const box = element("div", { className: `finding ${kind}` }, element("h3", {}, `${finding.episode?.ended ? formatTime(finding.episode.ended).slice(0, 16) + ", over" : word}: ${finding.title}`), element("p", {}, finding.text));
  if (finding.advice) box.append(element("p", {}, element("b", {}, "What to do: "), finding.advice));
  const operation = data.operations.find((one) => one.id === finding.operation);
  if (operation && finding.rank !== null) {
    const show = () => choose({ operation: operation.id, rank: finding.rank, value: finding.phase ? `phase:${finding.phase}` : undefined, scroll: true });
    box.append(element("button", { type: "button", onclick: show }, `Show rank ${finding.rank} of ${operationTitle(operation)}`));
  }
  return box;
}

function showAlerts(data, choose) {
  find("alerts").hidden = !data.alerts.length;
  find("alerts-title").textContent = `${plural(data.alerts.length, "alert")} over the run`;
  fillTable(find("alerts-table"), "Alerts, the newest first", ["Time", "Severity", "Rule", "Alert", ""], [...data.alerts].reverse().map((alert) => {
    const known = alert.rank !== null && data.operations.some((operation) => operation.id === alert.operation);
    const show = (rank) => choose({ operation: alert.operation, rank, value: alert.phase ? `phase:${alert.phase}` : undefined, scroll: true });
    return [formatTime(alert.time), (SEVERITIES[alert.severity] || SEVERITIES.info)[1], alert.rule, alert.text, known ? rankButton(alert.rank, show) : ""];
  }));
}

function showPhases(operation, choose) {
  fillTable(find("phases"), "Phases of the chosen operation", ["Phase", "Median>", "Longest>", "Slowest rank"],
    operation.phases.map(([name, middle, longest, rank]) => [
      element("button", { type: "button", onclick: () => choose({ value: `phase:${name}` }) }, name),
      formatSeconds(middle), formatSeconds(longest), rankButton(rank, (chosen) => choose({ rank: chosen, scroll: true })),
    ]));
}

function showStragglers(operation, choose) {
  const box = find("stragglers");
  // One failure ends the operation of all ranks, so most of them have failed for the reason of another one.
  const own = operation.failures.filter(([rank]) => rank === operation.cause);
  const rows = [
    ...own.map(([rank, stage, error]) => [rank, `failed in ${stage}: ${error}`, ""]),
    ...operation.missing.map((rank) => [rank, "reported nothing in time", ""]),
    ...operation.stragglers.map(([rank, host, phase, seconds, middle]) =>
      [rank, `${phase} on ${host || "an unknown host"}`, `${formatSeconds(seconds)}, median ${formatSeconds(middle)}`]),
  ];
  if (!rows.length) {
    box.replaceChildren(element("p", { className: "quiet" }, "No rank was far behind the others in any phase."));
    return;
  }
  const table = element("table");
  fillTable(table, "Stragglers and failed ranks", ["Rank", "What", "Time>"], rows.map(([rank, what, time]) =>
    [rankButton(rank, (chosen) => choose({ rank: chosen, scroll: true })), what, time]));
  box.replaceChildren(table);
  const total = operation.stragglerCount + operation.failureCount + operation.missingCount;
  const because = operation.failureCount > own.length ? ", most of which failed because others did" : "";
  if (total > rows.length)
    box.append(element("p", { className: "quiet" }, `and ${formatCount(total - rows.length)} more${because}; the heat map shows all.`));
}
