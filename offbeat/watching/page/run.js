// A run: what there is to see of it, and what a person can ask it for.

const MANY = 8;  // lines beyond so many are there when somebody asks for them
const MAX_STRETCHES = 32;
const MAX_RATES = 80;
const SURE_MS = 4000;
const LOG_EVERY_MS = 2000;
const FACTORS = [1, 2, 3, 5, 10];

const byId = id => document.getElementById(id);

function say(text, kind = "") {
  const link = byId("link");
  link.textContent = text;
  link.className = kind;
}

function section(title, id, ...children) {
  return make("section", { id }, make("h2", {}, title), ...children);
}

function plots(...figures) {
  return make("div", { class: "plots" }, ...figures.map(figure => figure.element));
}

// -- a run's data, put together out of what came ----------------------------------------------------

class Run {
  constructor() {
    this.fine = { width_s: 1, from: 0 };
    this.coarse = { width_s: 1, from: 0 };
    this.logs = {};
    this.moments = [];
    this.checkpoints = [];
    this.scores = { points: [], best: null };
  }

  take(view) {
    for (const name of ["fine", "coarse"]) this[name] = grown(this[name], view[name]);
    for (const [name, value] of Object.entries(view)) {
      if (name !== "fine" && name !== "coarse") this[name] = value;
    }
    for (const [name, , , , , line] of view.roles) if (line !== undefined) this.logs[name] = line;
    const total = this.fine.gradients.reduce((sums, count) => {
      sums.push((sums.at(-1) || 0) + count);
      return sums;
    }, []);
    this.done = total;
  }

  // The middle of a stretch, in seconds or in gradients.
  x(index, axis, kind) {
    if (kind === "s") return (index + 0.5) * axis.width_s;
    const at = Math.floor((index + 1) * axis.width_s / this.fine.width_s + 1e-9) - 1;
    return this.done[Math.min(this.done.length - 1, Math.max(0, at))] || 0;
  }

  points(values, axis, kind) {
    return values.map((value, index) => [this.x(index, axis, kind), value]);
  }

  // Over stretches that are long enough to count in; the last one is not over, and its rate is that of
  // the part that is.
  rates(values, kind) {
    const each = Math.ceil(values.length / MAX_RATES) || 1, width = each * this.fine.width_s;
    const found = [];
    for (let start = 0; start < values.length; start += each) {
      const count = values.slice(start, start + each).reduce((sum, value) => sum + value, 0);
      const part = Math.min(1, (this.status.trained_s - start * this.fine.width_s) / width);
      const x = this.x(Math.min(values.length, start + each / 2) - 0.5, this.fine, kind);
      if (part >= 0.4 || start === 0) found.push([x, count / width / (part || 1)]);
    }
    return found;
  }
}

// What was known up to where the new begins, and the new behind it.
function grown(known, found) {
  const merge = (before, now) => {
    if (Array.isArray(now)) return [...(before || []).slice(0, found.from), ...now];
    if (typeof now !== "object" || now === null) return now;
    const made = {};
    for (const [name, value] of Object.entries(now)) {
      const was = (before || {})[name] || [];
      const short = Math.max(0, found.from - was.length);
      made[name] = Array.isArray(value) ? merge([...was, ...Array(short).fill(null)], value)
        : merge(was, value);
    }
    return made;
  };
  return merge(known, found);
}

// -- orders ----------------------------------------------------------------------------------------

async function order(run, what, said) {
  said.textContent = "asking";
  try {
    const answer = await fetch("/order", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ run, ...what }),
    });
    said.textContent = answer.ok ? `asked for: ${(await answer.json()).words}` : await answer.text();
  } catch {
    said.textContent = "the page's server is not there";
  }
}

// A button that wants to be pressed twice.
function sureButton(text, title, act) {
  let timer = null;
  const button = make("button", { type: "button", text, title });
  const calm = () => {
    clearTimeout(timer);
    timer = null;
    button.textContent = text;
    button.classList.remove("sure");
  };
  button.addEventListener("click", () => {
    if (timer !== null) {
      calm();
      act();
      return;
    }
    button.textContent = "really?";
    button.classList.add("sure");
    timer = setTimeout(calm, SURE_MS);
  });
  button.addEventListener("blur", () => timer !== null && calm());
  return button;
}

// -- the page of a run -----------------------------------------------------------------------------

class RunPage {
  constructor(name, root) {
    this.name = name;
    this.run = new Run();
    this.x = "s";
    this.controls = new Map();
    this.openLog = null;
    this.makeTop();
    this.makePlots();
    root.replaceChildren(...this.sections());
    this.timer = setInterval(() => this.updateLog(), LOG_EVERY_MS);
  }

  close() {
    clearInterval(this.timer);
    linePlots.length = 0;
    for (const name of Object.keys(zooms)) delete zooms[name];
  }

  makeTop() {
    this.bar = make("div");
    this.progress = make("div", { class: "progress", role: "progressbar", "aria-label": "progress" },
      this.bar);
    this.tiles = make("dl", { class: "tiles" });
    this.said = make("span", { class: "said", role: "status" });
    this.checkpointButton = make("button", {
      type: "button", text: "Checkpoint now", onclick: () => this.order({ what: "checkpoint" }),
    });
    this.stopButton = sureButton("Stop in order",
      "every worker ends its step, then a last checkpoint", () => this.order({ what: "stop" }));
    this.orders = make("div", { class: "orders" }, this.checkpointButton, this.stopButton, this.said);
    this.moments = make("ul", { class: "moments" });
  }

  makePlots() {
    this.loss = new LinePlot("training loss", "loss");
    this.scorePlots = new Map();
    this.lr = new LinePlot("learning rate", "");
    const counts = { fromZero: true, limits: [0, Infinity] };
    this.gradientRate = new LinePlot("gradients a second", "", counts);
    this.exampleRate = new LinePlot("examples a second", "", counts);
    this.refused = new LinePlot("gradients that did not go in", "", counts);
    this.staleness = new LinePlot("staleness", "versions", counts);
    this.staleOfEach = new LinePlot("staleness of each worker", "versions", counts);
    this.versions = new LinePlot("version of each server's shard", "", counts);
    this.apart = new LinePlot("how far the shards are apart", "versions", counts);
    this.now = new Rows("the newest steps", "step");
    this.overall = new Rows("over the run", "stretch");
    this.learning = plots(this.loss, this.lr, this.gradientRate, this.exampleRate);
    this.workers = new Table([], "", "states");
    this.waits = new Table(["", "waits most for", "of the time"], "who waits for whom, just now");
    this.servers = new Table(["", "version", "behind the furthest", "restarts"]);
    this.roles = new Table(["", "host", "memory", "most", "processors", "", "last line of its log"], "", "worded");
    this.checkpoints = new Table(["version", "at, s of training", ""], "", "worded");
    this.log = make("pre", { hidden: true, tabindex: 0 });
    this.config = make("details", {}, make("summary", { text: "The configuration" }));
    this.numbers = [
      [this.loss, this.lr, this.gradientRate, this.exampleRate],
      [this.staleness, this.staleOfEach, this.refused],
      [this.now, this.overall], [this.versions, this.apart],
    ].map(each => new Numbers(each));
  }

  sections() {
    const [ofLearning, ofStaleness, ofWork, ofShards] = this.numbers;
    const over = kind => make("button", {
      type: "button", text: kind === "s" ? "over time" : "over gradients",
      "aria-pressed": String(kind === this.x), onclick: () => this.setX(kind),
    });
    this.xButtons = { s: over("s"), gradients: over("gradients") };
    const learning = section("How it learns, and how quickly", "learning", this.learning,
      ofLearning.element);
    learning.firstChild.append(make("span", { class: "buttons" }, ...Object.values(this.xButtons)));
    return [
      this.progress, this.tiles, this.orders,
      learning,
      section("What happened", "happened", this.moments),
      section("What the workers do", "work", plots(this.now, this.overall), this.workers.element,
        this.waits.element, ofWork.element),
      section("How stale", "stale", plots(this.staleness, this.staleOfEach, this.refused),
        ofStaleness.element),
      section("Servers", "servers", plots(this.versions, this.apart), this.servers.element,
        ofShards.element),
      section("Processes and logs", "processes", this.roles.element, this.log),
      section("Checkpoints", "checkpoints", this.checkpoints.element),
      section("How it is run", "configuration", this.config),
    ];
  }

  setX(kind) {
    this.x = kind;
    for (const [each, button] of Object.entries(this.xButtons)) {
      button.setAttribute("aria-pressed", String(each === kind));
    }
    this.updateLearning();
    this.updateSpeed();
  }

  order(what) {
    return order(this.name, what, this.said);
  }

  take(view) {
    if (view.hint) {
      byId("lead").textContent = view.hint;
      return;
    }
    this.run.take(view);
    if (view.about) this.describe(view.about);
    this.updateTop();
    this.updateLearning();
    this.updateSpeed();
    this.updateStaleness();
    this.updateWork();
    this.updateServers();
    if (view.moments) this.updateMoments();
    this.updateRoles();
    if (view.checkpoints || view.scores) this.updateCheckpoints();
    for (const numbers of this.numbers) numbers.update();
  }

  describe(about) {
    this.about = about;
    const servers = about.served ? counted(about.servers, "server") : "no server";
    const title = `${about.recipe}: ${about.variant}, ${counted(about.workers, "worker")}, ${servers}`;
    byId("title").textContent = title;
    document.title = title;
    const tables = [["options", about.options], ["what is really used", about.resolved],
      ["where", about.environment]].map(([caption, values]) => {
      const table = new Table(["", "value"], caption);
      table.set(Object.entries(values || {}).map(([name, value]) => [name, name, value]));
      for (const cell of table.body.querySelectorAll("td:last-child")) cell.classList.add("free");
      return table.element;
    });
    this.config.replaceChildren(this.config.firstElementChild, ...tables);
  }

  updateTop() {
    const { status, read } = this.run;
    const state = make("span", { class: `state ${status.status}`, text: words(status.status) });
    const more = [];
    if (read < 1) more.push(`reading what happened so far: ${Math.floor(100 * read)}%`);
    if (status.reason) more.push(status.reason);
    if (status.left_s !== null) more.push(`about ${duration(status.left_s)} left`);
    byId("lead").replaceChildren(state, ...(more.length ? [`: ${more.join("; ")}`] : []));
    this.bar.style.width = `${100 * (status.progress || 0)}%`;
    this.progress.hidden = status.progress === null;
    this.progress.setAttribute("aria-valuenow", Math.round(100 * (status.progress || 0)));
    const score = status.score ? status.score.values : [];
    const tiles = [
      ["gradients", whole(status.gradients)],
      ["gradients/s", short(status.gradients_per_s)],
      ["examples/s", short(status.examples_per_s)],
      ["loss", short(status.loss)],
      ...score.map(([name, value]) => [`test ${name}`, value === null ? "nan" : short(value)]),
      ["staleness", short(status.staleness)],
      ["version", whole(status.version)],
      ["of training", duration(status.trained_s)],
      ["dropped", whole(status.dropped)], ["rejected", whole(status.rejected)],
      ["lost updates", whole(status.lost)], ["restarts", whole(status.restarts)],
      ["up", bytes(status.up)], ["down", bytes(status.down)],
    ];
    if (status.mixed) tiles.push(["mixed replies", whole(status.mixed)]);
    if (status.unreadable) tiles.push(["unreadable lines", whole(status.unreadable)]);
    this.setTiles(tiles);
    const isLive = status.status === "running";
    this.orders.hidden = !isLive;
    byId("link").dataset.status = status.status;
  }

  setTiles(tiles) {
    const names = tiles.map(([name]) => name).join("\n");
    if (names !== this.tileNames) {
      this.tileNames = names;
      this.tiles.replaceChildren(...tiles.map(([name]) =>
        make("div", {}, make("dt", { text: name }), make("dd"))));
    }
    tiles.forEach(([, value], index) => {
      const place = this.tiles.children[index].lastChild;
      if (place.textContent !== value) place.textContent = value;
    });
  }

  get marks() {
    return this.run.moments.filter(([, kind]) => kind === "bad").map(([at, , text]) => [at, text]);
  }

  line(name, color, values, axis = this.run.fine, kind = "s", more = {}) {
    return { name, color, points: this.run.points(values, axis, kind), ...more };
  }

  // One for each worker or server; where they are many all of them together come first.
  linesOf(what, values, axis, kind = "s") {
    const found = Object.entries(values);
    const isMany = found.length > MANY;
    const each = found.map(([index, list]) =>
      this.line(`${what} ${index}`, isMany ? 3 + Number(index) % 5 : Number(index), list, axis, kind,
        { isHidden: isMany }));
    if (!isMany) return each;
    const over = choose => found[0][1].map((_, at) => {
      const known = found.map(([, list]) => list[at] ?? null).filter(value => value !== null);
      return known.length ? choose(known) : null;
    });
    const mean = list => list.reduce((a, b) => a + b) / list.length;
    return [
      this.line("mean of all", 0, over(mean), axis, kind),
      this.line("least", 2, over(list => Math.min(...list)), axis, kind),
      this.line("most", 1, over(list => Math.max(...list)), axis, kind),
      ...each,
    ];
  }

  updateLearning() {
    const { fine, coarse, scores } = this.run;
    const marks = this.x === "s" ? this.marks : [];
    const all = this.line("all workers", 0, fine.loss, fine, this.x);
    const each = this.linesOf("worker", coarse.loss, coarse, this.x)
      .filter(line => line.name !== "mean of all")
      .map((line, index) => ({ ...line, color: index + 1, isHidden: Object.keys(coarse.loss).length > 4 }));
    this.loss.set([all, ...each], this.x, marks);
    this.lr.element.hidden = fine.lr.every(value => value === null);
    this.lr.set([this.line("learning rate", 0, fine.lr, fine, this.x)], this.x, marks);
    const names = [...new Set(scores.points.flatMap(point => Object.keys(point[3])))];
    names.forEach((name, index) => {
      if (!this.scorePlots.has(name)) {
        const plot = new LinePlot(`test ${name}`, name, { limits: MEASURES.limits[name] });
        this.scorePlots.set(name, plot);
        this.learning.insertBefore(plot.element, this.lr.element);
        this.numbers[0].plots.push(plot);
      }
      const points = scores.points.filter(point => name in point[3])
        .map(([, at, gradients, values]) => [this.x === "s" ? at : gradients, values[name]])
        .sort(([one], [other]) => one - other);
      this.scorePlots.get(name).set([{ name, color: index, points }], this.x, marks);
    });
  }

  updateSpeed() {
    const { fine } = this.run;
    const marks = this.x === "s" ? this.marks : [];
    const rate = values => [{ name: "all workers", color: 0, points: this.run.rates(values, this.x) }];
    this.gradientRate.set(rate(fine.gradients), this.x, marks);
    this.exampleRate.set(rate(fine.examples), this.x, marks);
    const has = values => values.some(count => count > 0);
    this.refused.element.hidden = !has(fine.dropped) && !has(fine.rejected);
    this.refused.set([
      this.line("dropped", 0, fine.dropped), this.line("rejected", 1, fine.rejected),
    ], "s", this.marks);
  }

  updateStaleness() {
    const { fine, coarse } = this.run;
    const most = fine.most.map((value, index) => fine.staleness[index] === null ? null : value);
    this.staleness.set([
      this.line("mean", 0, fine.staleness), this.line("most", 1, most),
    ], "s", this.marks);
    this.staleOfEach.set(this.linesOf("worker", coarse.staleness, coarse), "s", this.marks);
  }

  updateWork() {
    const { run } = this;
    const ranks = run.workers.map(([rank]) => rank);
    const names = ranks.map(rank => `worker ${rank}`);
    this.now.set(names, run.recent.map(([rank, number, start, ...parts]) =>
      ({ row: ranks.indexOf(rank), number, start, parts: parts.map(part => part / 1000) })));
    this.overall.set(names, ranks.flatMap((rank, row) => this.stretches(rank, row)));
    this.updateWorkers();
    this.waits.element.hidden = !run.waits.length;
    this.waits.set(run.waits.map(([rank, other, share]) =>
      [rank, `worker ${rank}`, `worker ${other}`, `${(100 * share).toFixed(1)}%`]));
  }

  // Of a worker's whole run, at most so many that one can tell their parts apart.
  stretches(rank, row) {
    const all = this.run.coarse.parts[rank] || [];
    const each = Math.ceil(all.length / MAX_STRETCHES) || 1, width = each * this.run.coarse.width_s;
    const found = [];
    for (let start = 0; start < all.length; start += each) {
      const known = all.slice(start, start + each).filter(Boolean);
      if (!known.length) continue;
      const shares = known[0].map((_, part) =>
        Math.round(known.reduce((sum, one) => sum + one[part], 0) / known.length));
      found.push({
        row, number: found.length + 1, start: start * this.run.coarse.width_s, shares,
        parts: shares.map(share => share * width * known.length / each / 100),
      });
    }
    return found;
  }

  updateWorkers() {
    const canAsk = this.run.status.status === "running";
    this.workers.setHeader(["", "", "steps", "a second", "loss", "staleness", "dropped", "rejected",
      "restarts", "up", "down", ...(canAsk ? ["slow down", ""] : [])]);
    this.workers.set(this.run.workers.map(([rank, state, steps, expected, rate, loss, stale, dropped,
      rejected, restarts, up, down, factor]) => {
      const [slow, stop] = this.controlsOf(rank, factor, state);
      const of = expected === null ? "" : ` of ${whole(expected)}`;
      return [`${rank}${canAsk}`, `worker ${rank}`, factor > 1 ? `${state}, ${factor}x as slow` : state,
        whole(steps) + of, short(rate), short(loss), short(stale), whole(dropped), whole(rejected),
        whole(restarts), bytes(up), bytes(down), ...(canAsk ? [slow, stop] : [])];
    }));
  }

  controlsOf(rank, factor, state) {
    if (!this.controls.has(rank)) {
      const slow = make("select", {
        "aria-label": `slow worker ${rank} down`, title: "for trying it out",
        onchange: () => this.order({ what: "slow", worker: rank, factor: Number(slow.value) }),
      }, ...FACTORS.map(each => make("option", { value: each, text: each === 1 ? "no" : `${each}x` })));
      const stop = rank === 0 ? make("span")  // the master's
        : sureButton("stop", `worker ${rank} ends its step and leaves`,
          () => this.order({ what: "stop_worker", worker: rank }));
      this.controls.set(rank, [slow, stop]);
    }
    const [slow, stop] = this.controls.get(rank);
    if (document.activeElement !== slow) slow.value = String(factor);
    slow.disabled = stop.disabled = state === "stopped" || state === "through";
    return [slow, stop];
  }

  updateServers() {
    const { fine, servers, status } = this.run;
    byId("servers").hidden = !servers.length;
    const shards = fine.versions;
    this.versions.set(this.linesOf("server", shards, fine), "s", this.marks);
    const lists = Object.values(shards);
    const apart = (lists[0] || []).map((_, at) => {
      const known = lists.map(list => list[at] ?? null).filter(value => value !== null);
      return known.length > 1 ? Math.max(...known) - Math.min(...known) : null;
    });
    this.apart.element.hidden = lists.length < 2;
    this.apart.set([this.line("furthest less nearest", 0, apart)], "s", this.marks);
    this.servers.set(servers.map(([index, version, restarts]) => [index, `server ${index}`,
      whole(version), whole(status.version - version), whole(restarts)]));
  }

  updateMoments() {
    this.moments.replaceChildren(...this.run.moments.toReversed().map(([at, kind, text]) =>
      make("li", { class: kind }, make("span", { text: `${short(at)} s` }), text)));
  }

  updateRoles() {
    this.roles.set(this.run.roles.map(([name, host, memory, most, processors]) => [
      name, roleWords(name), host || this.whereabouts(name),
      memory === null ? "-" : bytes(memory), most ? bytes(most) : "-",
      processors === null ? "-" : processors.toFixed(2),
      this.logButton(name), this.lastLine(name),
    ]));
  }

  whereabouts(name) {
    if (this.about.engine === "inproc") return "in the command";
    return /^(master|evaluator|ps-|worker-)/.test(name) ? "not known" : "-";
  }

  logButton(name) {
    const known = this.controls.get(`log ${name}`);
    if (known) return known;
    const button = make("button", {
      type: "button", text: "log", "aria-expanded": "false", onclick: () => this.showLog(name),
    });
    button.hidden = this.run.logs[name] === undefined;
    this.controls.set(`log ${name}`, button);
    return button;
  }

  lastLine(name) {
    const key = `line ${name}`;
    if (!this.controls.has(key)) this.controls.set(key, make("span", { class: "last" }));
    const place = this.controls.get(key), text = this.run.logs[name] ?? "";
    if (place.textContent !== text) {
      place.textContent = place.title = text;
      this.controls.get(`log ${name}`).hidden = !text;
    }
    return place;
  }

  showLog(name) {
    this.openLog = this.openLog === name ? null : name;
    for (const [key, button] of this.controls) {
      if (String(key).startsWith("log ")) {
        button.setAttribute("aria-expanded", String(key === `log ${this.openLog}`));
      }
    }
    this.log.hidden = this.openLog === null;
    this.log.textContent = "";
    this.updateLog();
  }

  async updateLog() {
    if (this.openLog === null || document.hidden) return;
    const query = new URLSearchParams({ run: this.name, role: this.openLog });
    try {
      const answer = await fetch(`/log?${query}`);
      if (!answer.ok) return;
      const text = (await answer.json()).join("\n");
      const isAtEnd = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 4;
      if (this.log.textContent === text) return;
      this.log.textContent = text;
      if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
    } catch {
      return;  // the stream tells that the server is away
    }
  }

  updateCheckpoints() {
    const { checkpoints, scores } = this.run;
    const of = new Map(scores.points.map(([version, , , values]) => [version, values]));
    this.checkpoints.set(checkpoints.toReversed().map(([version, at]) => {
      const found = Object.entries(of.get(version) || {})
        .map(([name, value]) => `${name} ${value === null ? "nan" : short(value)}`);
      if (scores.best && scores.best[0] === version) found.push("the best");
      return [version, whole(version), short(at), found.join(", ")];
    }));
  }
}

function words(status) {
  return status[0].toUpperCase() + status.slice(1);
}

function roleWords(name) {
  const [kind, number] = name.split("-");
  const known = { ps: "server", launcher: "the command", master: "master and worker 0" }[kind] || kind;
  return number === undefined ? known : `${known} ${number}`;
}
