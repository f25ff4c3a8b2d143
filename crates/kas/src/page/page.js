// The page of kas. What comes from kas is put into the document as text, never as markup.
"use strict";

const HISTORY = 120; // seconds of requests that are drawn
const ROWS = 200; // agents that are shown before somebody asks for more
const EVENTS = 100;
const ALOUD = 10; // lines that are kept for those who have them read
const SILENT_MS = 6000; // kas says something each second

const state = {
  overview: null,
  agents: null,
  why: null,
  cluster: null, // numbers of objects of the agent of the page
  long: null, // open requests without an end of their own; null: the endpoint for kubectl is off
  rates: new Map(), // replica -> its requests per second, the newest last
  counted: new Map(), // replica -> the last count and when it was made
  alarms: new Set(), // those that have been read
  told: false, // whether events were told: later ones are said aloud
  seen: new Set(), // events that are in the log
  log: [],
  connections: null, // connections at the last list, to tell what has changed
  all: false,
};

/** How a replica is, as colour, mark and words. */
function health(replica) {
  const is = (kind, mark, words) => ({ kind, mark, words });
  if (replica.state === "left") return is("lost", "–", "has left");
  if (replica.standing === "gone" || replica.standing === "unreachable") return is("lost", "✕", replica.standing);
  if (replica.standing === "suspect") return is("doubt", "?", "suspect: not heard on every way");
  if (replica.state === "hung") return is("doubt", "!", "hung: its gossip lives, the rest does not");
  if (replica.state === "draining" || replica.standing === "draining") return is("doubt", "↘", "draining");
  if (replica.state === "starting") return is("doubt", "…", "starting");
  if (!replica.synced) return is("doubt", "…", "its table is being read");
  return is("well", "✓", replica.standing === "self" ? "ready, this one" : "ready");
}

// What kas tells.

function takeOverview(overview) {
  for (const replica of overview.replicas) {
    const before = state.counted.get(replica.name);
    if (replica.ended === null) {
      state.counted.delete(replica.name);
      continue;
    }
    // Changes are told between the seconds too.
    const passed = before ? replica.counted_at - before.at : Infinity;
    if (passed >= 0 && passed < 900) continue;
    state.counted.set(replica.name, { at: replica.counted_at, ended: replica.ended });
    // It has started anew, or the clock was set back.
    if (!before || passed < 0 || replica.ended < before.ended) continue;
    const rates = state.rates.get(replica.name) ?? [];
    rates.push((1000 * (replica.ended - before.ended)) / passed);
    if (rates.length > HISTORY) rates.shift();
    state.rates.set(replica.name, rates);
  }
  const names = new Set(overview.replicas.map((replica) => replica.name));
  for (const name of state.rates.keys()) if (!names.has(name)) state.rates.delete(name);
  state.overview = overview;
  showOverview();
  showTreeLink();
}

function takeEvents(events) {
  const first = !state.told;
  state.told = true;
  for (const event of events) {
    const key = `${event.at} ${event.replica} ${event.standing} ${event.state}`;
    if (state.seen.has(key)) continue;
    state.seen.add(key);
    const says = ["ready", ""].includes(event.state) ? "" : ` (${event.state})`;
    const words = event.standing === "" ? "is not known any more" : `is ${event.standing}${says}`;
    note(event.at, `Replica ${event.replica} ${words}`, !first);
  }
  const kept = new Set(events.map((e) => `${e.at} ${e.replica} ${e.standing} ${e.state}`));
  for (const key of state.seen) if (!kept.has(key)) state.seen.delete(key);
  if (state.overview) showOverview();
}

function takeAgents(agents) {
  const now = new Map((agents.connections ?? []).map((c) => [`${c.agent} ${c.pod} ${c.since}`, c]));
  const name = (c) => `Agent ${c.agent} (${c.name})${c.pod ? `, pod ${c.pod},` : ""}`;
  // What a silent replica held is not known, and a list that is cut says nothing of the rest.
  if (state.connections && agents.connections && !agents.omitted && !agents.unanswered.length) {
    const at = state.overview?.at ?? Date.now();
    for (const [key, c] of now) if (!state.connections.has(key)) note(at, `${name(c)} has connected`, false);
    for (const [key, c] of state.connections) if (!now.has(key)) note(at, `${name(c)} has disconnected`, false);
  }
  state.connections = agents.connections && !agents.omitted && !agents.unanswered.length ? now : state.connections;
  state.agents = agents;
  if (state.overview) showOverview();
}

function note(at, text, aloud) {
  // The newest first, also of those of one moment.
  state.log.unshift({ at, text });
  state.log.sort((a, b) => b.at - a.at);
  state.log.length = Math.min(state.log.length, EVENTS);
  if (aloud) tell(text);
}

/** An alarm without for how long it has been. */
const lasting = (alarm) => alarm.replace(/\b\d+(ns|µs|ms|s)\b/g, "");

/** Tells those who do not see the page, line by line: what replaces another line at once would not be read. */
function tell(text) {
  $("said").append(make("p", {}, text));
  while ($("said").childElementCount > ALOUD) $("said").firstElementChild.remove();
}

// The overview.

/** Requests a second now; null: a replica that tells nothing now may have any number. */
function speed(replica) {
  return replica.ended === null ? null : (state.rates.get(replica.name)?.at(-1) ?? null);
}

function showOverview() {
  const { replicas, alarms } = state.overview;
  const me = replicas[0];
  say($("me"), `as ${me.name} knows it · ${me.version}`);
  $("alarms").hidden = alarms.length === 0;
  show($("alarms").querySelector("ul"), ...alarms.map((alarm) => make("li", {}, alarm)));
  // Not by a live region of their own: what appears together with its region is not read, and how long an alarm has
  // lasted would be read each second.
  const told = new Set(alarms.map(lasting));
  for (const alarm of alarms) if (!state.alarms.has(lasting(alarm))) tell(`Alarm: ${alarm}`);
  if (state.alarms.size && !told.size) tell("No alarm any more");
  state.alarms = told;
  const live = replicas.filter((replica) => health(replica).kind !== "lost");
  const sum = (of) => live.reduce((total, replica) => total + (of(replica) ?? 0), 0);
  const rates = live.map(speed).filter((r) => r !== null);
  const connections = state.agents?.connections;
  const agents = connections ? new Set(connections.map((c) => c.agent)).size : null;
  const totals = [
    ["Replicas ready", `${replicas.filter((r) => health(r).kind === "well").length} of ${replicas.length}`],
    ["Agents connected", known(agents)],
    ["Tunnels", known(sum((replica) => replica.tunnels))],
    ["Requests a second", rates.length ? rate(rates.reduce((a, b) => a + b, 0)) : "–"],
    ["Requests open", known(sum((replica) => replica.open))],
    ["Requests waiting", known(sum((replica) => replica.waiting))],
  ];
  const manifests = state.overview.manifests;
  if (manifests) {
    const wrong = [["failed", manifests.failed], ["degraded", manifests.degraded], ["wait to be pruned", manifests.to_prune]];
    const told = wrong.filter(([, count]) => count).map(([what, count]) => `${count} ${what}`);
    totals.push(["Manifest projects here", [known(manifests.projects), ...told].join(", ")]);
  }
  show($("totals"), ...totals.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  showMap(replicas);
  show($("replicas"), ...replicas.map(card));
  showAgents();
  show($("events"), ...state.log.map((e) => make("li", {}, make("time", { datetime: new Date(e.at).toISOString() }, clock(e.at)), e.text)));
}

function held(name) {
  const agents = new Map();
  for (const c of state.agents?.connections ?? []) if (c.holders.includes(name)) agents.set(c.agent, c.name);
  return agents;
}

function showMap(replicas) {
  const width = Math.max(280, Math.min($("map").clientWidth || 800, 1200));
  const many = replicas.length;
  const radius = width < 500 || many > 8 ? 24 : 34;
  // A ring that is flat where the page is wide; one replica stands alone.
  const down = many === 1 ? 0 : Math.min(280, 50 + 22 * many);
  const across = many === 1 ? 0 : Math.min(width / 2 - radius - 50, down * 2.6);
  const top = radius + 20;
  const places = replicas.map((replica, n) => {
    const angle = (2 * Math.PI * n) / many - Math.PI / 2;
    const x = Math.round(width / 2 + across * Math.cos(angle));
    const y = Math.round(top + down + down * Math.sin(angle));
    return { replica, x, y, health: health(replica) };
  });
  const height = Math.max(...places.map((place) => place.y)) + radius + 56;
  const parts = [];
  for (const to of places.slice(1)) {
    const kind = to.health.kind === "well" ? "" : to.health.kind;
    parts.push(draw("line", { class: `edge ${kind}`, x1: places[0].x, y1: places[0].y, x2: to.x, y2: to.y }));
  }
  const most = many > 8 ? 14 : 24;
  const cut = (text) => (text.length > most ? `${text.slice(0, most / 2 - 2)}…${text.slice(-most / 2)}` : text);
  for (const { replica, x, y, health } of places) {
    const agents = held(replica.name).size;
    const dots = [];
    // As many as fit around it; the number says the rest.
    for (let n = 0; n < Math.min(agents, 24); n++) {
      const angle = (2 * Math.PI * n) / Math.max(12, Math.min(agents, 24)) - Math.PI / 2;
      const at = radius + 9;
      dots.push(draw("circle", { class: "dot", r: 4, cx: (x + at * Math.cos(angle)).toFixed(1), cy: (y + at * Math.sin(angle)).toFixed(1) }));
    }
    const kind = health.kind === "well" ? "" : health.kind;
    parts.push(
      draw("g", { "data-replica": replica.name },
        draw("circle", { class: `disc ${kind}`, cx: x, cy: y, r: radius }),
        draw("text", { class: `mark ${health.kind}`, x, y }, health.mark),
        ...dots,
        draw("text", { x, y: y + radius + 30 }, cut(replica.name)),
        draw("text", { class: "quiet", x, y: y + radius + 46 }, `${health.words.split(":")[0]} · ${count(replica.agents, "agent")}`),
      ),
    );
  }
  const words = places.map(({ replica, health }) => `${replica.name}: ${health.words}, ${count(replica.agents, "agent")}`);
  const label = `Map of ${count(many, "replica")}. ${words.join("; ")}`;
  show($("map"), draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...parts));
}

function spark(name) {
  const rates = state.rates.get(name) ?? [];
  const most = Math.max(1, ...rates);
  const x = (n) => (100 * (n + HISTORY - rates.length)) / (HISTORY - 1);
  const y = (r) => 35 - (33 * r) / most;
  const points = rates.map((r, n) => `${x(n).toFixed(2)} ${y(r).toFixed(2)}`);
  const label = rates.length
    ? `Requests a second in the last ${ago(1000 * rates.length)}: now ${rate(rates.at(-1))}, at most ${rate(Math.max(...rates))}`
    : "Requests a second: nothing is known yet";
  const svg = draw("svg", { class: "spark", viewBox: "0 0 100 36", preserveAspectRatio: "none", role: "img", "aria-label": label });
  if (points.length > 1) {
    svg.append(
      draw("path", { class: "under", d: `M${x(0).toFixed(2)} 36L${points.join("L")}L100 36Z` }),
      draw("path", { d: `M${points.join("L")}` }),
    );
  }
  return svg;
}

function card(replica) {
  const { kind, mark, words } = health(replica);
  const fact = (name, value) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
  const table = replica.synced ? `table complete, version ${replica.table_version}` : "table not complete here";
  const heard = replica.heard_ms === null ? "the replica that tells this" : `heard ${ago(replica.heard_ms)} ago`;
  const parts = [
    make("h3", {}, replica.name),
    make("p", { class: "health" }, `${mark} ${words}`),
    make("dl", { class: "facts" },
      fact("Agents", known(replica.agents)),
      fact("Tunnels", known(replica.tunnels)),
      fact("Requests/s", rate(speed(replica))),
      fact("Open", known(replica.open)),
      fact("Waiting", known(replica.waiting)),
      fact("Version", replica.version || "–"),
    ),
    make("p", { class: "small" }, `${replica.address === replica.name ? "" : `${replica.address} · `}${table} · ${heard}`),
  ];
  if (replica.silent) parts.push(make("p", { class: "small" }, `does not tell about itself: ${replica.silent}`));
  parts.push(spark(replica.name));
  return make("li", { "data-health": kind, "data-replica": replica.name }, ...parts);
}

function cell(of, ...content) {
  return make("td", { "data-of": of }, ...content);
}

function showAgents() {
  if (!state.agents) return;
  const { connections, omitted, unanswered } = state.agents;
  const notes = [];
  if (connections === null) notes.push("There are too many agents to list them here. Give the number of one to see why its requests go the way they do.");
  if (omitted) notes.push(`${count(omitted, "connection")} more, not listed.`);
  if (unanswered.length) notes.push(`Not answered: ${unanswered.join(", ")}. Agents there may be missing.`);
  const agents = new Map();
  for (const c of connections ?? []) {
    const agent = agents.get(c.agent) ?? { ...c, pods: [], versions: new Set() };
    agent.pods.push(c.pod || "–");
    agent.versions.add(c.version || "–");
    agent.since = Math.min(agent.since, c.since);
    agents.set(c.agent, agent);
  }
  const wanted = $("filter").value.trim().toLowerCase();
  const fits = (a) => !wanted || [a.agent, a.name, a.project, ...a.pods].some((text) => text.toLowerCase().includes(wanted));
  const found = [...agents.values()].filter(fits);
  const rows = state.all ? found : found.slice(0, ROWS);
  if (connections && !agents.size) notes.push("No agent is connected.");
  else if (connections && !found.length) notes.push("No agent fits the filter.");
  $("more").hidden = rows.length === found.length;
  say($("more"), `Show all ${found.length}`);
  say($("agents-note"), notes.join(" "));
  const now = state.overview?.at ?? Date.now();
  show($("agents").tBodies[0], ...rows.map((a) =>
    make("tr", {},
      make("th", { scope: "row" }, make("a", { href: `#agent-${a.agent}` }, `${a.agent} ${a.name}`)),
      cell("Project", a.project),
      cell("Tunnels at", a.holders.join(", ") || "nobody"),
      cell("Pods", a.pods.join(", ")),
      cell("Version", [...a.versions].join(", ")),
      cell("Connected", make("time", { datetime: new Date(a.since).toISOString() }, `${ago(now - a.since)} ago`)),
    ),
  ));
}

// Clusters.

function takeFleet({ why, agents }) {
  $("fleet-panel").hidden = false;
  const notes = [];
  if (why) notes.push(`The clusters are not counted now: ${why}`);
  else if (!agents.length) notes.push("No agent is known.");
  if (agents.length > ROWS) notes.push(`${count(agents.length - ROWS, "agent")} more, not shown.`);
  say($("fleet-note"), notes.join(" "));
  show($("fleet"), ...agents.slice(0, ROWS).map((a) => {
    const [kind, mark, words] = rowsAre(a.state);
    const fact = ([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
    return make("li", { "data-agent": a.agent, "data-health": kind },
      make("a", { href: `#agent-${a.agent}` }, `${a.agent} ${a.name}`),
      make("p", { class: "health" }, `${mark} ${words}`),
      ...(a.reason ? [make("p", { class: "small" }, a.reason)] : []),
      ...(a.counts.length ? [make("dl", { class: "facts" }, ...a.counts.map(fact))] : []));
  }));
}

function showCluster() {
  const cluster = state.cluster;
  const shown = cluster !== null && cluster.agent === agentOfPage();
  $("cluster-panel").hidden = !shown;
  if (!shown) return;
  const [, mark, words] = rowsAre(cluster.state);
  say($("cluster-note"), `${mark} ${words}${cluster.reason ? `: ${cluster.reason}` : ""}`);
  const total = (states) => Object.values(states).reduce((sum, n) => sum + n, 0);
  // The most first, and those of the same number by their names.
  const sorted = (states) => Object.entries(states).sort(([a, n], [b, m]) => m - n || a.localeCompare(b));
  const of = (resource) =>
    make("li", { "data-resource": resource.name },
      `${resource.name}: ${known(total(resource.states))}`,
      make("ul", {}, ...sorted(resource.states).map(([name, n]) => make("li", { "data-state": name }, `${name}: ${known(n)}`))));
  show($("cluster"),
    make("li", { "data-resource": "namespaces" },
      `Namespaces with such objects: ${known(cluster.namespaces)}`,
      make("ul", {}, ...cluster.resources.filter((resource) => total(resource.states)).map(of))));
}

// Long requests.

const KINDS = {
  upgrade: "exec, attach, port-forward",
  proxy: "requests to pods and services",
  watch: "watches",
  follow: "logs that are followed",
};
const SOURCES = {
  ci: "CI job tokens",
  pat: "personal access tokens",
  cookie: "sessions of browsers",
  oidc: "ID tokens",
  file: "tokens of the users file",
  certificate: "client certificates",
};

function takeLong(long) {
  state.long = long;
  $("long-panel").hidden = long === null;
  if (long === null) return;
  const { counts, callers, omitted } = long;
  const number = (n) => make("td", { class: "number", "data-of": "Open" }, known(n));
  const kind = (row) => KINDS[row.kind] ?? row.kind;
  say($("long-note"), counts.length ? "" : "None is open.");
  $("long").hidden = counts.length === 0;
  show($("long").tBodies[0], ...counts.map((row) =>
    make("tr", {}, make("th", { scope: "row" }, kind(row)), cell("Callers with", SOURCES[row.source] ?? row.source), number(row.open))));
  $("callers-part").hidden = callers === null || counts.length === 0;
  say($("callers-note"), omitted ? `${count(omitted, "line")} more, not listed.` : "");
  show($("callers").tBodies[0], ...(callers ?? []).map((row) =>
    make("tr", {},
      make("th", { scope: "row" }, row.name),
      cell("Kind", kind(row)),
      cell("Agent", make("a", { href: `#agent-${row.agent}` }, row.agent)),
      number(row.open))));
}

// An agent.

/** Links to the tree of the agent's cluster, if kas says where that is. */
function showTreeLink() {
  const clusters = state.overview?.clusters ?? null;
  const agent = agentOfPage();
  $("clusters").hidden = clusters === null || agent === null;
  // Its scheme is http or https: the configuration has nothing else.
  if (clusters !== null) $("clusters").firstElementChild.href = `${clusters}#agent-${agent}`;
}

function showWhy() {
  const why = state.why;
  const id = agentOfPage();
  if (!why || why.agent !== id) {
    say($("verdict"), "Asking every replica…");
    show($("route"));
    for (const table of ["holds", "beliefs", "pods"]) show($(table).tBodies[0]);
    $("manifests-panel").hidden = true;
    say($("agent-title"), `Agent ${id}`);
    return;
  }
  const name = why.connections[0]?.name;
  say($("agent-title"), name ? `Agent ${id}: ${name}` : `Agent ${id}`);
  const holds = (replica) => replica.idle + replica.busy > 0;
  const tunnels = (replica) =>
    [replica.idle ? `${replica.idle} idle` : "", replica.busy ? `${replica.busy} busy` : ""].filter(Boolean).join(", ");
  const holders = why.replicas.filter(holds).map((replica) => `${replica.name} (${tunnels(replica)})`);
  const waiting = why.replicas.reduce((sum, replica) => sum + replica.waiting, 0);
  const silent = why.silent.map((s) => s.address).join(", ");
  const beliefs = why.replicas.flatMap((replica) => replica.beliefs.map((belief) => ({ replica, belief })));
  const gitlab = new Set(beliefs.filter(({ belief }) => belief.gitlab && belief.holds).map(({ belief }) => belief.name));
  let verdict = holders.length ? `Tunnels at ${holders.join(" and ")}.` : "No replica that answered holds a tunnel of it.";
  if (gitlab.size) verdict += ` According to Redis, GitLab's kas at ${[...gitlab].join(" and ")} holds it: it is asked for tunnels, and cannot report.`;
  if (waiting) verdict += ` ${count(waiting, "request waits", "requests wait")} for it.`;
  if (silent) verdict += ` Not answered: ${silent}.`;
  say($("verdict"), verdict);
  show($("route"), ...why.route.map((step) => make("li", {}, step)));
  const number = (of, n) => make("td", { class: "number", "data-of": of }, String(n));
  show($("holds").tBodies[0],
    ...why.replicas.map((r) => make("tr", {}, make("th", { scope: "row" }, r.name), number("Idle tunnels", r.idle), number("Busy tunnels", r.busy), number("Waiting requests", r.waiting))),
    ...why.silent.map((s) => make("tr", {}, make("th", { scope: "row" }, s.address), make("td", { colspan: 3 }, `did not answer: ${s.reason}`))));
  const truth = new Map(why.replicas.map((replica) => [replica.name, holds(replica)]));
  const yes = (is) => (is ? "yes" : "no");
  show($("beliefs").tBodies[0], ...beliefs.map(({ replica, belief }) =>
    make("tr", {},
      make("th", { scope: "row" }, replica.name),
      cell("Believes of", belief.name),
      cell("Holds", yes(belief.holds)),
      cell("True", truth.has(belief.name) ? yes(truth.get(belief.name) === belief.holds) : belief.gitlab ? "it cannot say" : "it did not say"),
      cell("Why", belief.why))));
  const now = state.overview?.at ?? Date.now();
  showManifests(why.manifests, now);
  const pods = why.connections.map((c) =>
    make("tr", {},
      make("th", { scope: "row" }, c.pod || "–"), cell("Version", c.version || "–"), cell("Replica", c.unconfirmed ? `${c.replica} (unconfirmed)` : c.replica), cell("Connected", `${ago(now - c.since)} ago`)));
  if (why.omitted) pods.push(make("tr", {}, make("td", { colspan: 4 }, `${count(why.omitted, "connection")} more, not listed.`)));
  show($("pods").tBodies[0], ...(pods.length ? pods : [make("tr", {}, make("td", { colspan: 4 }, "No pod of it is connected."))]));
}

function showManifests(manifests, now) {
  $("manifests-panel").hidden = !manifests;
  if (!manifests) return;
  const notes = [manifests.waits ? `kas applies nothing: ${manifests.waits}` : `Replica ${manifests.replica} plans for it.`];
  if (manifests.omitted) notes.push(`${count(manifests.omitted, "project")} more, not listed.`);
  say($("manifests-note"), notes.join(" "));
  const number = (of, text) => make("td", { class: "number", "data-of": of }, text);
  show($("manifests").tBodies[0], ...manifests.projects.map((p) =>
    make("tr", { "data-phase": p.phase },
      make("th", { scope: "row" }, p.name),
      cell("Phase", p.phase),
      cell("Since", p.since ? `${ago(now - p.since)}` : "–"),
      cell("Applied", p.applied || "–"),
      cell("Wanted", p.wanted || "–"),
      number("Current objects", `${known(p.current)} of ${known(p.objects)}`),
      number("Wait to be pruned", p.to_prune ? known(p.to_prune) : "–"),
      cell("Why", p.message || "–"))));
}

// The stream. While nobody can see the page there is none.

let source = null;
let heard = 0;
let again = 0;

function connect() {
  clearTimeout(again);
  const before = source;
  source = null;
  if (document.hidden) return before?.close();
  const agent = agentOfPage();
  heard = Date.now();
  const mine = (source = new EventSource(agent === null ? "events" : `events?agent=${agent}`));
  // Only now: what kas has asked the others is kept while somebody looks.
  for (const name of ["open", "error"]) mine.addEventListener(name, () => before?.close(), { once: true });
  const on = (name, take) =>
    mine.addEventListener(name, (event) => {
      if (source !== mine) return;
      heard = Date.now();
      link("on", "Live");
      take(JSON.parse(event.data));
    });
  on("overview", takeOverview);
  on("events", takeEvents);
  on("agents", takeAgents);
  on("long", takeLong);
  on("fleet", takeFleet);
  on("cluster", (cluster) => {
    state.cluster = cluster;
    showCluster();
  });
  on("why", (why) => {
    state.why = why;
    if (agentOfPage() !== null) showWhy();
  });
  mine.addEventListener("error", () => {
    if (source !== mine) return;
    link("off", "Not connected: trying again");
    // A refusal ends it for good: this replica starts, has gone, or too many look on.
    if (mine.readyState === EventSource.CLOSED) again = setTimeout(connect, 3000);
  });
}

function go() {
  const agent = agentOfPage();
  $("overview").hidden = agent !== null;
  $("agent").hidden = agent === null;
  document.title = agent === null ? "kas" : `Agent ${agent} – kas`;
  if (agent !== null) {
    showWhy();
    showTreeLink();
    showCluster();
    $("agent-title").focus({ preventScroll: true });
    scrollTo(0, 0);
  } else if (state.overview) showOverview();
  connect();
}

setInterval(() => {
  if (source && Date.now() - heard > SILENT_MS) {
    link("off", "kas is silent: trying again");
    source.close();
    connect();
  }
}, 1000);

// What people do.

$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const wanted = $("filter").value.trim();
  const link = $("agents").querySelector("tbody a");
  if (/^[1-9]\d{0,18}$/.test(wanted)) location.hash = `agent-${wanted}`;
  else if (wanted && link) location.hash = link.getAttribute("href");
  else $("filter").focus();
});
$("filter").addEventListener("input", showAgents);
$("more").addEventListener("click", () => {
  state.all = true;
  showAgents();
});
addEventListener("hashchange", go);
addEventListener("resize", () => state.overview && showMap(state.overview.replicas));
document.addEventListener("visibilitychange", connect);
go();
