// What runs now, asked from the monitor about once a second.

const LIVE_SECONDS = 1;

function showLive(operations) {
  find("live").hidden = !operations.length;
  find("live-body").replaceChildren(...operations.map(showRunning));
}

function showRunning(operation) {
  const { rank, host, phase, seconds, done, planned } = operation.ranks;
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const [moved, all] = [sum(done), sum(planned)];
  const age = Math.max(operation.age, 0);
  const counts = new Map();
  phase.forEach((name) => counts.set(name, (counts.get(name) || 0) + 1));
  const running = operation.time - operation.began + age;
  // The others wait for the rank that needs longest.
  const left = Math.max(...rank.map((_, place) => done[place] < planned[place] ? (planned[place] / done[place] - 1) * seconds[place] : 0)) - age;
  const state = operation.ended ? "ended" : age > 30 ? `no news for ${formatSeconds(age)}` : `running for ${formatSeconds(running)}`;
  const box = element("div", { className: "live-operation" },
    element("p", {}, element("b", {}, operationTitle(operation)), `: ${state}, ${formatSize(moved)} of ${formatSize(all)} on ` +
      `${plural(rank.length, "rank")}` + (left > 0 && Number.isFinite(left) && !operation.ended ? `, about ${formatSeconds(left)} left at this speed` : "")),
    element("progress", { max: Math.max(all, 1), value: moved, ariaLabel: `Progress of ${operationTitle(operation)}` }),
    element("p", { className: "quiet" }, "Ranks by phase: " + [...counts].map(([name, count]) => `${name} ${formatCount(count)}`).join(", "))
  );
  const share = (place) => (planned[place] ? done[place] / planned[place] : 1);
  const last = [...rank.keys()].sort((a, b) => share(a) - share(b)).slice(0, 5);
  const table = element("table");
  // Few columns, as a phone is narrow.
  fillTable(table, "Ranks that are furthest behind", ["Furthest behind", "Phase", "Bytes>"], last.map((place) => [
    `rank ${rank[place]}${host[place] && ` on ${host[place]}`}`, phase[place],
    planned[place] ? `${Math.floor((100 * done[place]) / planned[place])} % of ${formatSize(planned[place])}` : "",
  ]));
  box.append(element("div", { className: "scroll" }, table));
  return box;
}

// Ask until the page is left. `changed` gets the data of the page when the monitor has new ones.
async function follow(changed) {
  let version = "";
  for (;;) {
    try {
      const answer = await fetch(`live.json?version=${encodeURIComponent(version)}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(`the monitor answers with status ${answer.status}`);
      const news = await answer.json();
      showLive(news.running);
      if (news.version !== version) {
        const data = await fetch("data.json", { cache: "no-store" });
        if (!data.ok) throw new Error(`the monitor answers with status ${data.status}`);
        const read = await data.json();
        if (read) changed(read); // else the monitor is still reading
        version = news.version;
      }
      notify(news.error);
    } catch (error) {
      notify(`The monitor does not answer: ${error.message}. What is below may be old.`);
    }
    await new Promise((resolve) => setTimeout(resolve, LIVE_SECONDS * 1000));
  }
}

function notify(text) {
  find("notice").hidden = !text;
  if (find("notice").textContent !== text) find("notice").textContent = text;
}
