// The page with the trees of clusters. It reads views as any other client does, with the credential of its user, which
// is kept in this tab only.
"use strict";

/** The most rows of each view. kas leaves the others out, and says so. */
const MOST = { summary: 500, nodes: 500, workloads: 1000, pods: 2000 };
/** Workloads with more pods than this are closed at first. */
const OPEN_PODS = 20;
const LONGEST_EVENT = 16 << 20; // characters
const LONGEST_REFUSAL = 4096; // characters of a refusal that are read
const SILENT_MS = 45_000; // kas says something each 15 s
const WAIT_MS = { first: 1_000, longest: 30_000 };
const SETTLE_MS = 100; // changes within this time are drawn together
const AGES_MS = 10_000;
/** After these, the same question has the same answer. */
const FINAL = new Set([400, 401, 403, 404, 405, 501]);

/** The resources of the kinds that control pods. */
const WORKLOADS = {
  "deployments.apps": "Deployment",
  "statefulsets.apps": "StatefulSet",
  "daemonsets.apps": "DaemonSet",
  "jobs.batch": "Job",
};

/** Where pods are shown that nothing controls. */
const ALONE = "Pods of their own";

/** The credential: nothing else knows it, and nothing keeps it. */
class Credential {
  #text = null;

  /** Takes what somebody has typed. Returns what is wrong with it; null: nothing. */
  take(typed) {
    const text = typed.trim().replace(/^Bearer\s+/i, "");
    if (!/^[\x21-\x7e]{1,8192}$/.test(text)) return "A credential is one word of at most 8192 letters, digits and signs.";
    this.#text = text;
    return null;
  }

  forget() {
    this.#text = null;
  }

  get isThere() {
    return this.#text !== null;
  }

  /** Returns the headers of a request. */
  headers() {
    return { authorization: `Bearer ${this.#text}`, accept: "text/event-stream" };
  }
}

const credential = new Credential();

/** Reads the events of a body; `take` gets the name, the id (null: none) and the data of each. */
async function readEvents(body, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const event = { name: "", id: null, data: "" };
      for (const line of rest.slice(0, end).split("\n")) {
        const at = line.indexOf(":");
        const text = line.slice(at + 1).replace(/^ /, "");
        if (line.startsWith("event:")) event.name = text;
        else if (line.startsWith("id:")) event.id = text;
        else if (line.startsWith("data:")) event.data = text;
      }
      rest = rest.slice(end + 2);
      take(event);
    }
    if (rest.length > LONGEST_EVENT) throw new Error("an event of kas is too large");
  }
}

/** One view of some agents: its rows, kept fresh until it is closed. */
class View {
  rows = new Map();
  agents = new Map(); // id -> { name, state, reason }
  /** What is to be said of it; empty: nothing. */
  note = "is being read";
  isRefused = false;
  #name;
  #parameters;
  #changed;
  #last = ""; // where it was; empty: everything must be sent
  #closing = new AbortController();

  /** `changed` is called after each change. */
  constructor(name, parameters, changed) {
    this.#name = name;
    this.#parameters = new URLSearchParams({ ...parameters, watch: "1", maxRows: MOST[name] });
    this.#changed = changed;
    this.#run();
  }

  close() {
    this.#closing.abort();
  }

  async #run() {
    let wait = WAIT_MS.first;
    while (!this.#closing.signal.aborted) {
      const began = Date.now();
      let end;
      try {
        end = await this.#follow();
      } catch (error) {
        end = { code: 0, message: `kas does not answer: ${error.message}` };
      }
      if (this.#closing.signal.aborted) return;
      if (FINAL.has(end.code)) return this.#refuse(end);
      // What is known stays, and is said to be old.
      this.note = `${end.message || "kas has ended the answer"}: trying again`;
      link("off", "Not connected: trying again");
      this.#changed();
      if (Date.now() - began > WAIT_MS.longest) wait = WAIT_MS.first;
      await this.#sleep(end.wait ?? wait * (0.5 + Math.random() / 2));
      wait = Math.min(2 * wait, WAIT_MS.longest);
    }
  }

  #sleep(ms) {
    return new Promise((done) => {
      const timer = setTimeout(done, ms);
      this.#closing.signal.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
    });
  }

  #refuse({ code, message }) {
    this.#forget();
    this.isRefused = true;
    this.note = message || `kas refuses this: ${code}`;
    if (code === 401) return forget("This credential is not valid, or not any more.");
    // kas can be reached, and says why: that is no failure of the connection.
    link("on", "Live");
    this.#changed();
  }

  #forget() {
    this.rows.clear();
    this.agents.clear();
    this.#last = "";
  }

  /** Asks once. Returns how it ended: `code` of HTTP, `message`, and after how many milliseconds to ask again. */
  async #follow() {
    const silent = new AbortController();
    let timer = setTimeout(() => silent.abort(), SILENT_MS);
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(), SILENT_MS);
    };
    try {
      const headers = credential.headers();
      if (this.#last) headers["last-event-id"] = this.#last;
      const response = await fetch(`../views/${this.#name}?${this.#parameters}`, {
        headers,
        mode: "same-origin",
        credentials: "omit",
        cache: "no-store",
        redirect: "error",
        referrerPolicy: "no-referrer",
        signal: AbortSignal.any([silent.signal, this.#closing.signal]),
      });
      if (!response.ok) return await this.#refusal(response);
      let end = { code: 0, message: "" };
      let isFirst = !this.#last;
      const noisy = new TransformStream({
        transform(chunk, controller) {
          heard();
          controller.enqueue(chunk);
        },
      });
      await readEvents(response.body.pipeThrough(noisy), ({ name, id, data }) => {
        // A question without a place to go on is answered with everything.
        if (isFirst) this.#forget();
        isFirst = false;
        if (name === "ended") end = JSON.parse(data);
        else if (data) this.#take(name, id, JSON.parse(data));
      });
      return end;
    } finally {
      clearTimeout(timer);
    }
  }

  async #refusal(response) {
    const text = (await response.text()).slice(0, LONGEST_REFUSAL);
    let message = "";
    try {
      message = String(JSON.parse(text).message ?? "");
    } catch {
      message = response.statusText; // that of a proxy
    }
    const wait = Number(response.headers.get("retry-after"));
    return { code: response.status, message, ...(wait > 0 ? { wait: 1000 * Math.min(wait, 300) } : {}) };
  }

  #take(name, id, data) {
    const key = (row) => `${row.agent_id} ${row.resource} ${row.namespace} ${row.name}`;
    link("on", "Live");
    switch (name) {
      case "agent":
        this.agents.set(data.id, data);
        break;
      case "upserted":
        for (const row of data.rows) if (this.rows.size < MOST[this.#name] || this.rows.has(key(row))) this.rows.set(key(row), row);
        break;
      case "removed":
        for (const row of data.rows) this.rows.delete(key(row));
        break;
      case "reset":
        this.#forget();
        break;
      case "synced": {
        this.#last = id ?? "";
        const notes = data.unanswered.map((agent) => agent.reason);
        if (data.truncated) notes.push(`only ${known(this.rows.size)} are shown`);
        this.note = [...new Set(notes)].slice(0, 5).join("; ");
        break;
      }
    }
    this.#changed();
  }
}

// What is drawn.

/** The views of what is shown now. */
let views = {};
let drawing = 0;

function changed() {
  if (!drawing) drawing = setTimeout(() => ((drawing = 0), redraw()), SETTLE_MS);
}

function redraw() {
  if (!credential.isThere) return;
  if (views.summary) showFleet(views.summary);
  if (views.pods) showAgent(views);
}

/** Makes the children of an element those of the items. What stays is the same element: with its focus, and open. */
function place(parent, items, create, update) {
  const wanted = new Set(items.map((item) => item.key));
  for (const child of [...parent.children]) if (!wanted.has(child.dataset.key)) child.remove();
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    let child = known.get(item.key);
    if (!child) {
      child = create(item);
      child.dataset.key = item.key;
    }
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
    update(child, item);
  }
}

const byName = (a, b) => (a.key < b.key ? -1 : a.key > b.key ? 1 : 0);

function showFleet(view) {
  const counts = new Map([...view.rows.values()].map((row) => [row.agent_id, row.cells]));
  const agents = [...view.agents.values()].sort((a, b) => a.id - b.id);
  const notes = [view.note];
  if (view.isRefused) notes.push("You can still ask for the cluster of an agent by its number.");
  if (agents.length > MOST.summary) notes.push(`${count(agents.length - MOST.summary, "agent")} more, not shown.`);
  say($("fleet-note"), notes.filter(Boolean).join(" "));
  const items = agents.slice(0, MOST.summary).map((agent) => ({ key: String(agent.id), agent, counts: counts.get(agent.id) }));
  const create = ({ key }) =>
    make("li", { "data-agent": key }, make("a", { href: `#agent-${key}` }), make("p", { class: "health" }), make("p", { class: "small" }), make("dl", { class: "facts" }));
  place($("fleet"), items, create, (tile, { key, agent, counts }) => {
    const [kind, mark, words] = rowsAre(agent.state);
    const [name, health, why, facts] = tile.children;
    tile.dataset.health = kind;
    say(name, `${key} ${agent.name}`);
    say(health, `${mark} ${words}`);
    say(why, agent.reason);
    why.hidden = !agent.reason;
    show(facts, ...Object.entries(counts ?? {}).map(([title, n]) => make("div", {}, make("dt", {}, title), make("dd", {}, n))));
  });
}

/** How a pod is, as colour and mark. */
function podIs({ Ready = "", Status = "" }) {
  const [ready, all] = Ready.split("/");
  if (["Completed", "Succeeded"].includes(Status)) return ["well", "✓"];
  if (Status === "Running") return ready === all ? ["well", "✓"] : ["doubt", "…"];
  if (/^(Pending|ContainerCreating|PodInitializing|Terminating|Init:\d+\/\d+)$/.test(Status)) return ["doubt", "…"];
  return ["lost", "✕"];
}

function nodeIs({ Status = "" }) {
  if (Status === "Ready") return ["well", "✓"];
  return Status.startsWith("Ready,") ? ["doubt", "!"] : ["lost", "✕"];
}

/** How far a workload is, in the words of its columns. */
function workloadSays({ Ready = "", Desired = "", Completions = "" }) {
  if (Completions) return `${Completions} completed`;
  if (Desired) return `${Ready || "0"}/${Desired} ready`;
  return Ready && `${Ready} ready`;
}

/** Returns the namespaces with their workloads and those with their pods, all sorted. */
function treeOf(workloads, pods) {
  const namespaces = new Map();
  const namespace = (name) => {
    if (!namespaces.has(name)) namespaces.set(name, { key: name, pods: 0, groups: new Map() });
    return namespaces.get(name);
  };
  const group = (of, key, says) => {
    if (!of.groups.has(key)) of.groups.set(key, { key, says, pods: [] });
    return of.groups.get(key);
  };
  for (const row of workloads) {
    const kind = WORKLOADS[row.resource] ?? row.resource;
    group(namespace(row.namespace), `${kind}/${row.name}`, workloadSays(row.cells));
  }
  for (const row of pods) {
    const of = namespace(row.namespace);
    of.pods += 1;
    group(of, row.owner || ALONE, "").pods.push({ key: row.name, row });
  }
  const all = [...namespaces.values()].sort(byName);
  for (const one of all) {
    one.groups = [...one.groups.values()].sort(byName);
    for (const { pods } of one.groups) pods.sort(byName);
  }
  return all;
}

function showAgent({ nodes, workloads, pods }) {
  const id = agentOfPage();
  const name = [nodes, workloads, pods].flatMap((view) => [...view.agents.values()]).find((agent) => agent.name)?.name;
  say($("agent-title"), name ? `Agent ${id}: ${name}` : `Agent ${id}`);
  const now = Date.now();
  const age = ({ time }) => (time > 0 ? ago(now - 1000 * time) : "");
  const note = (what, view) => say($(`${what}-note`), view.note && `${what[0].toUpperCase()}${what.slice(1)}: ${view.note}`);
  note("workloads", workloads);
  note("pods", pods);
  note("nodes", nodes);

  const branch = (isOpen) => {
    const details = make("details", {}, make("summary", {}, make("span", { class: "name" }), " ", make("span", { class: "quiet" })), make("ul"));
    details.open = isOpen;
    return details;
  };
  const fillBranch = (details, name, quiet) => {
    const [first, second] = details.firstElementChild.children;
    say(first, name);
    say(second, quiet);
    return details.lastElementChild;
  };
  const leaf = () => make("li", {}, make("span", { class: "mark", "aria-hidden": "true" }), " ", make("span", { class: "name" }), " ", make("span", { class: "quiet" }));
  const fillLeaf = (li, [kind, mark], name, quiet) => {
    li.dataset.health = kind;
    const [first, second, third] = li.children;
    say(first, mark);
    say(second, name);
    say(third, quiet.filter(Boolean).join(" · "));
  };
  const showPods = (ul, pods) =>
    place(ul, pods, ({ key }) => fill(leaf(), { "data-pod": key }, []), (li, { key, row }) => {
      const { Ready, Status, Restarts, Node } = row.cells;
      const restarts = Restarts && !Restarts.startsWith("0") ? `restarts ${Restarts}` : "";
      fillLeaf(li, podIs(row.cells), key, [Status, Ready, restarts, Node !== "<none>" && Node, age(row)]);
    });
  const showGroups = (ul, groups) =>
    place(ul, groups, ({ key, pods }) => make("li", { "data-workload": key }, branch(pods.length <= OPEN_PODS)), (li, { key, says, pods }) => {
      const list = fillBranch(li.firstElementChild, key.replace("/", " "), [says, count(pods.length, "pod")].filter(Boolean).join(" · "));
      showPods(list, pods);
    });
  const tree = treeOf(workloads.rows.values(), pods.rows.values());
  place($("tree"), tree, ({ key }) => make("li", { "data-namespace": key }, branch(true)), (li, { key, pods, groups }) => {
    const workloads = groups.filter((group) => group.key !== ALONE).length;
    showGroups(fillBranch(li.firstElementChild, key, `${count(workloads, "workload")} · ${count(pods, "pod")}`), groups);
  });
  if (!tree.length && !pods.note && !workloads.note) say($("pods-note"), "There are no workloads and no pods.");

  const onNode = new Map();
  for (const { cells } of pods.rows.values()) onNode.set(cells.Node, (onNode.get(cells.Node) ?? 0) + 1);
  const items = [...nodes.rows.values()].map((row) => ({ key: row.name, row })).sort(byName);
  place($("nodes"), items, ({ key }) => fill(leaf(), { "data-node": key }, []), (li, { key, row }) => {
    const { Status, Roles, Version } = row.cells;
    const seen = onNode.get(key);
    fillLeaf(li, nodeIs(row.cells), key, [Status, Roles !== "<none>" && Roles, Version, seen ? `${count(seen, "pod")} shown` : "", age(row)]);
  });
}

// What people do.

/** The namespaces that the user has named. */
let namespaces = "";

function close() {
  for (const view of Object.values(views)) view.close();
  views = {};
}

/** Shows what the address says, with the credential. */
function go() {
  const agent = agentOfPage();
  close();
  $("overview").hidden = agent !== null;
  $("agent").hidden = agent === null;
  document.title = agent === null ? "Clusters – kas" : `Agent ${agent} – kas`;
  for (const list of ["fleet", "tree", "nodes"]) $(list).replaceChildren();
  for (const what of ["fleet", "workloads", "pods", "nodes"]) say($(`${what}-note`), "");
  say($("agent-title"), agent === null ? "" : `Agent ${agent}`);
  // When somebody sees the page again, it is asked for.
  if (!credential.isThere || document.hidden) return;
  link("wait", "Connecting…");
  if (agent === null) {
    views = { summary: new View("summary", { agents: "all" }, changed) };
    return;
  }
  const agents = `id=${agent}`;
  const within = namespaces ? { namespaces } : {};
  views = {
    nodes: new View("nodes", { agents }, changed),
    workloads: new View("workloads", { agents, ...within }, changed),
    pods: new View("pods", { agents, columns: "*", ...within }, changed),
  };
}

function forget(why) {
  credential.forget();
  $("forget").hidden = true;
  go();
  link("wait", "No credential");
  say($("ask-note"), why);
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = $("credential").value;
  $("credential").value = "";
  namespaces = $("namespaces").value.split(/[\s,]+/).filter(Boolean).join(",");
  // With the credential from before, other namespaces are asked for.
  const wrong = typed || !credential.isThere ? credential.take(typed) : null;
  if (wrong) return say($("ask-note"), wrong);
  $("forget").hidden = false;
  say($("ask-note"), "This tab has a credential until you leave or reload the page.");
  go();
});
$("forget").addEventListener("click", () => forget("The credential is forgotten."));
$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const wanted = $("number").value.trim();
  if (/^[1-9]\d{0,18}$/.test(wanted)) location.hash = `agent-${wanted}`;
  else $("number").focus();
});
addEventListener("hashchange", () => {
  go();
  if (agentOfPage() !== null) $("agent-title").focus({ preventScroll: true });
});
document.addEventListener("visibilitychange", () => (document.hidden ? close() : go()));
// The page may be kept by the browser to come back to.
addEventListener("pagehide", () => forget("The credential was forgotten when you left the page."));
setInterval(() => document.hidden || redraw(), AGES_MS);
go();
