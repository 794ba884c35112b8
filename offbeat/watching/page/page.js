// The runs of a folder, and the stream that shows them or one of them.

class FolderPage {
  constructor(root) {
    this.grid = new Table([]);
    this.runs = new Table(["", "", "gradients", "a second", "loss", "test", "staleness", "s of training",
      "left"]);
    this.gridSection = section("The grid", "grid", this.grid.element);
    this.links = new Map();
    root.replaceChildren(this.gridSection, section("Runs", "runs", this.runs.element));
  }

  close() {
    return;
  }

  take(view) {
    const names = Object.keys(view.runs);
    byId("title").textContent = document.title = view.grid ? "A comparison" : "Runs";
    const done = view.grid ? `; ${view.grid.done} of ${counted(view.grid.cells, "cell")} are done` : "";
    byId("lead").textContent = `${view.path}: ${counted(names.length, "run")}${done}`;
    delete byId("link").dataset.status;
    this.gridSection.hidden = !view.grid;
    if (view.grid) this.updateGrid(view.grid, view.runs);
    this.runs.set(names.map(name => {
      const run = view.runs[name];
      return [name, this.link("run", name, name), this.state(name, run), whole(run.gradients ?? null),
        short(run.gradients_per_s), short(run.loss), score(run), short(run.staleness),
        short(run.trained_s), duration(run.left_s)];
    }));
  }

  link(kind, name, text) {
    const key = `${kind} ${name}`;
    if (!this.links.has(key)) {
      this.links.set(key, make("a", { href: `#run=${encodeURIComponent(name)}` }));
    }
    const link = this.links.get(key);
    if (link.textContent !== text) link.textContent = text;
    return link;
  }

  state(name, run) {
    const text = run.progress !== null && run.status === "running"
      ? `running, ${Math.floor(100 * run.progress)}%` : run.status;
    const key = `state ${name}`;
    if (!this.links.has(key)) this.links.set(key, make("span"));
    const place = this.links.get(key);
    place.className = `state ${run.status}`;
    place.title = run.reason || "";
    if (place.textContent !== text) place.textContent = text;
    return place;
  }

  updateGrid(grid, runs) {
    this.grid.setHeader(["", ...grid.seeds.map(seed => `seed ${seed}`), "mean"]);
    this.grid.set(Object.entries(grid.settings).map(([setting, cells]) => {
      const values = [];
      const shown = grid.seeds.map(seed => {
        const run = runs[cells[seed]];
        if (!run) return "-";
        const value = run.score ? run.score.values[0][1] : null;
        if (run.status === "finished" && value !== null) values.push(value);
        const text = run.status === "finished" ? short(value)
          : run.status === "running" && run.progress !== null
            ? `${Math.floor(100 * run.progress)}%` : run.status;
        return this.link("cell", cells[seed], text);
      });
      const mean = values.length ? short(values.reduce((a, b) => a + b) / values.length) : "";
      return [setting, setting, ...shown, mean];
    }));
  }
}

function score(run) {
  return (run.score ? run.score.values : []).map(([name, value]) => `${name} ${short(value)}`).join(", ")
    || "-";
}

// -- the stream ------------------------------------------------------------------------------------

const RETRY_MS = 1000;
const HIDDEN_MS = 60_000;  // a page that nobody sees for so long leaves its place to others

let stream = null, page = null, again = null, leaving = null;

function asked() {
  return SETUP.single ?? new URLSearchParams(location.hash.slice(1)).get("run");
}

function open() {
  const name = asked();
  byId("back").hidden = SETUP.single !== null || name === null;
  if (page) page.close();
  page = name === null ? new FolderPage(byId("content")) : new RunPage(name, byId("content"));
  connect();
}

function address() {
  const name = asked();
  return `/events${name === null ? "" : `?${new URLSearchParams({ run: name })}`}`;
}

function connect() {
  clearTimeout(again);
  if (stream) stream.close();
  const mine = stream = new EventSource(address());
  mine.onmessage = event => {
    page.take(JSON.parse(event.data));
    const status = byId("link").dataset.status;
    const isOver = status && !["running", "starting"].includes(status);
    say(isOver ? `the run is ${status}` : "live", isOver ? "over" : "live");
  };
  mine.onerror = () => {
    say("the page's server is away: trying again");
    if (mine.readyState !== EventSource.CLOSED) return;  // it tries again by itself
    again = setTimeout(knock, RETRY_MS);
  };
}

// Why there is no stream: the token may be asked for anew, or too many look on.
async function knock() {
  const asking = new AbortController();
  try {
    const answer = await fetch(address(), { signal: asking.signal });
    if (answer.status === 401) {
      location.reload();
      return;
    }
    if (!answer.ok) {
      say((await answer.text()).trim());
      again = setTimeout(knock, RETRY_MS);
      return;
    }
    asking.abort();  // an EventSource takes it from here
  } catch {
    say("the page's server is away: trying again");
  }
  connect();
}

function measure() {
  const { left, right, top, bottom, width, height } = MEASURES;
  const box = byId("inside-box");
  const sizes = { x: left, y: top - 4, width: width - left - right + 4, height: height - top - bottom + 8 };
  for (const [key, value] of Object.entries(sizes)) box.setAttribute(key, value);
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(leaving);
  if (document.hidden) {
    leaving = setTimeout(() => stream.close(), HIDDEN_MS);
    return;
  }
  for (const plot of linePlots) plot.update();
  if (stream.readyState === EventSource.CLOSED) connect();
});
window.addEventListener("hashchange", open);
measure();
open();
