"use strict";
// Plots as SVG, of the measures, ticks and numbers of a report (report/svg.py, report/document.py).

const SETUP = JSON.parse(document.getElementById("setup").textContent);
const MEASURES = SETUP.measures;
const SPACE = "http://www.w3.org/2000/svg";
const MAX_DOTS = 40;

function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") made.textContent = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function shape(name, attributes = {}, text = null) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

// Four digits or so, and no more than it has.
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e12 || size < 1e-4) {
    const [digits, power] = value.toExponential(1).split("e");
    return `${digits.replace(/\.0$/, "")}e${power[0]}${power.slice(1).padStart(2, "0")}`;
  }
  if (size >= 10000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  const digits = Math.min(4, Math.max(0, 3 - Math.floor(Math.log10(size))));
  const text = value.toFixed(digits);
  return text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;
}

// Round numbers from `low` or below it to `high` or above it.
function ticks(low, high, most = 6, limits = null) {
  if (!(high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high)))) {
    [low, high] = [low - (Math.abs(low) / 2 || 1), high + (Math.abs(high) / 2 || 1)];
    if (limits) [low, high] = [Math.max(low, limits[0]), Math.min(high, limits[1])];
  }
  const rough = (high - low) / (most - 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const factor = [1, 2, 2.5, 5, 10].find(each => each * power >= rough * (1 - 1e-9));
  const step = factor * power;
  const found = [];
  const last = Math.ceil(high / step - 1e-9);
  const digits = Math.min(20, Math.max(0, 3 - Math.floor(Math.log10(step))));
  for (let i = Math.floor(low / step + 1e-9); i <= last; i++) {
    found.push(Number((i * step).toFixed(digits)));
  }
  return found;
}

// The same where each is ten times, or a few times, the one before.
function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const factors = last - first <= 2 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = first; power <= last; power++) {
    for (const factor of factors) found.push(factor * 10 ** power);
  }
  const from = Math.max(0, found.findLastIndex(value => value <= low));
  const to = found.findIndex(value => value >= high);
  const every = Math.ceil((to - from + 1) / 8);
  return found.slice(from, to < 0 ? undefined : to + 1).filter((_, i, all) =>
    i % every === 0 || i === all.length - 1);
}

class Scale {
  constructor(low, high, start, end, isLog = false) {
    const of = isLog ? Math.log10 : value => value;
    Object.assign(this, { low, high, start, end, of, isLog });
    this.factor = (end - start) / (of(high) - of(low) || 1);
  }

  place(value) {
    return Math.round(10 * (this.start + (this.of(value) - this.of(this.low)) * this.factor)) / 10;
  }

  value(place) {
    const found = this.of(this.low) + (place - this.start) / this.factor;
    return this.isLog ? 10 ** found : found;
  }
}

// What the mouse, a finger or the keyboard shows of a plot: a line, and values beside it.
class Cursor {
  constructor(plot, moved, keyed) {
    this.tip = make("div", { class: "tip", hidden: true, role: "status" });
    this.plot = plot;
    plot.append(this.tip);
    plot.addEventListener("pointermove", event => moved(this.at(event)));
    plot.addEventListener("pointerleave", () => moved(null));
    plot.addEventListener("keydown", event => {
      if (keyed(event.key)) event.preventDefault();
    });
    plot.addEventListener("blur", () => moved(null));
  }

  // In the plot's own units.
  at(event) {
    const box = this.plot.querySelector("svg").getBoundingClientRect();
    const unit = MEASURES.width / box.width;
    return [(event.clientX - box.left) * unit, (event.clientY - box.top) * unit];
  }

  show(x, rows) {
    this.tip.replaceChildren(...rows.map(([text, kind]) =>
      make("div", {}, ...(kind ? [swatch(kind)] : []), text)));
    this.tip.hidden = false;
    this.tip.classList.toggle("left", x > MEASURES.width / 2);
  }

  hide() {
    this.tip.hidden = true;
  }
}

function swatch(kind) {
  const made = shape("svg", { viewBox: "0 0 10 10", class: "swatch", "aria-hidden": "true" });
  made.append(shape("rect", { class: kind, width: 10, height: 10, rx: 2 }));
  return made;
}

function kindOf(color) {
  return `f${color % MEASURES.colors}`;
}

// A figure: its title, buttons, legend and plot; drawn anew when it changes and can be seen.
class Figure {
  constructor(title, label = title) {
    this.title = title;
    this.buttons = make("span", { class: "buttons" });
    this.legend = make("ul", { class: "legend" });
    this.plot = make("div", { class: "plot", tabindex: 0, role: "img", "aria-label": label });
    this.svg = shape("svg", { viewBox: `0 0 ${MEASURES.width} ${MEASURES.height}` });
    this.plot.append(this.svg);
    this.element = make("figure", {},
      make("figcaption", {}, make("span", { text: title }), this.buttons), this.legend, this.plot);
    this.isSeen = true;
    this.isStale = false;
    new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting;
      if (this.isSeen && this.isStale) this.draw();
    }, { rootMargin: "200px" }).observe(this.element);
  }

  update() {
    this.isStale = true;
    if (this.isSeen && !document.hidden) this.draw();
  }

  draw() {
    this.isStale = false;
    this.svg.replaceChildren(...this.shapes());
  }
}

const zooms = {};  // by what x is; plots of the same x are zoomed together
const linePlots = [];

class LinePlot extends Figure {
  constructor(title, y, options = {}) {
    super(title, `${title}; its numbers are in the table below`);
    Object.assign(this, { y, lines: [], marks: [], x: "s" });
    this.limits = options.limits || null;
    this.fromZero = options.fromZero === true;
    this.isLog = false;
    this.hidden = new Map();
    this.cursorX = null;
    this.names = "";
    this.drag = null;
    this.cursor = new Cursor(this.plot, at => this.moved(at), key => this.keyed(key));
    this.plot.addEventListener("pointerdown", event => this.pressed(event));
    this.plot.addEventListener("pointerup", event => this.released(event));
    this.plot.addEventListener("dblclick", () => this.zoom(null));
    if (options.log !== false) {
      this.logButton = make("button", {
        type: "button", text: "log", "aria-pressed": "false", title: "a logarithmic scale",
        onclick: () => this.setLog(!this.isLog),
      });
      this.buttons.append(this.logButton);
    }
    this.allButton = make("button", {
      type: "button", text: "all", hidden: true, title: "show all of it again",
      onclick: () => this.zoom(null),
    });
    this.buttons.append(this.allButton);
    linePlots.push(this);
  }

  // lines: name, color, points of [x, y or null], and whether it is there at first
  set(lines, x, marks = []) {
    this.lines = lines;
    this.x = x;
    this.marks = marks;
    for (const line of lines) {
      if (!this.hidden.has(line.name)) this.hidden.set(line.name, line.isHidden === true);
    }
    const names = lines.map(line => line.name).join("\n");
    if (names !== this.names) {
      this.names = names;
      this.makeLegend();
    }
    this.update();
  }

  get shown() {
    return this.lines.filter(line => !this.hidden.get(line.name));
  }

  makeLegend() {
    const items = this.lines.length < 2 ? [] : this.lines.map(line => make("li", {}, make("button", {
      type: "button", "aria-pressed": String(!this.hidden.get(line.name)), title: "show or hide",
      onclick: event => {
        const isHidden = !this.hidden.get(line.name);
        this.hidden.set(line.name, isHidden);
        event.currentTarget.setAttribute("aria-pressed", String(!isHidden));
        this.draw();
      },
    }, swatch(kindOf(line.color)), line.name)));
    this.legend.replaceChildren(...items);
  }

  setLog(isLog) {
    this.isLog = isLog;
    this.logButton.setAttribute("aria-pressed", String(isLog));
    this.draw();
  }

  zoom(span) {
    zooms[this.x] = span;
    for (const plot of linePlots) if (plot.x === this.x) plot.update();
  }

  // -- scales and shapes --------------------------------------------------------------------------

  measure() {
    const span = zooms[this.x];
    this.allButton.hidden = !span;
    const { left, right, width, top, bottom, height } = MEASURES;
    const points = this.shown.flatMap(line => line.points.filter(([x, y]) =>
      y !== null && (!span || (x >= span[0] && x <= span[1])) && (!this.isLog || y > 0)));
    if (!points.length) return false;
    const all = this.lines.flatMap(line => line.points);
    const [from, to] = span || [0, all.reduce((most, [x]) => Math.max(most, x), 0) || 1];
    let [low, high] = points.reduce(
      ([least, most], [, y]) => [Math.min(least, y), Math.max(most, y)], [Infinity, -Infinity]);
    if (this.fromZero && !this.isLog) low = Math.min(0, low);
    this.yTicks = this.isLog ? logTicks(low, high) : ticks(low, high, 6, this.limits);
    if (this.yTicks.length < 2) this.yTicks = [low / 2, low * 2];
    this.xs = new Scale(from, to, left, width - right);
    this.ys = new Scale(this.yTicks[0], this.yTicks.at(-1), height - bottom, top, this.isLog);
    return true;
  }

  shapes() {
    const { left, right, width, top, bottom, height } = MEASURES;
    if (!this.measure()) {
      return [shape("text", { x: width / 2, y: height / 2, class: "mid" }, "nothing to show yet")];
    }
    const found = [...this.axes()];
    for (const [x, text] of this.marks) {
      if (x < this.xs.low || x > this.xs.high) continue;
      const mark = shape("g");
      const path = shape("path", { class: "mark", d: `M${this.xs.place(x)} ${top}V${height - bottom}` });
      mark.append(path, shape("title", {}, text));
      found.push(mark);
    }
    const inside = shape("g", { "clip-path": "url(#inside)" });
    for (const line of this.shown) inside.append(...this.lineShapes(line));
    found.push(inside);
    if (this.drag) {
      const [from, to] = [this.drag.from, this.drag.to].sort((a, b) => a - b);
      found.push(shape("rect", {
        class: "chosen", x: from, y: top, width: to - from, height: height - bottom - top,
      }));
    }
    if (this.cursorX !== null) found.push(...this.cursorShapes());
    return found;
  }

  *axes() {
    const { left, right, width, top, bottom, height } = MEASURES;
    const floor = height - bottom;
    for (const value of this.yTicks) {
      const at = this.ys.place(value);
      yield shape("path", { class: "grid", d: `M${left} ${at}H${width - right}` });
      yield shape("text", { x: left - 5, y: at + 3.5, class: "end" }, short(value));
    }
    for (const value of ticks(this.xs.low, this.xs.high)) {
      if (value < this.xs.low || value > this.xs.high * (1 + 1e-9)) continue;
      const text = short(value), at = this.xs.place(value);
      const atEdge = at + 3.4 * text.length > width;
      yield shape("text", {
        x: atEdge ? width - 1 : at, y: floor + 14, class: atEdge ? "end" : "mid",
      }, text);
    }
    yield shape("path", { class: "axis", d: `M${left} ${floor}H${width - right}` });
    const middle = (top + floor) / 2;
    yield shape("text", { x: (left + width - right) / 2, y: height - 6, class: "mid name" },
      this.x === "s" ? "s of training" : this.x);
    if (!this.y) return;  // its title says it
    yield shape("text", {
      x: 10, y: middle, class: "mid name", transform: `rotate(-90 10 ${middle})`,
    }, this.y);
  }

  *lineShapes(line) {
    const parts = [];
    let count = 0;
    for (const [x, y] of line.points) {
      const isThere = y !== null && (!this.isLog || y > 0);
      if (!isThere) continue;  // the line goes on behind it
      parts.push(`${parts.length ? "L" : "M"}${this.xs.place(x)} ${this.ys.place(y)}`);
      count += 1;
    }
    const again = line.color >= MEASURES.colors || line.dashed;
    const color = line.color % MEASURES.colors;
    const dash = again ? { "stroke-dasharray": "5 4" } : {};
    yield shape("path", { class: `line s${color}`, d: parts.join(""), ...dash });
    if (count > MAX_DOTS) return;
    for (const [x, y] of line.points) {
      if (y === null || (this.isLog && y <= 0)) continue;
      yield shape("circle", {
        class: `dot f${color}`, cx: this.xs.place(x), cy: this.ys.place(y), r: 1.8,
      });
    }
  }

  // -- what is pointed at -------------------------------------------------------------------------

  get places() {
    const found = new Set(this.shown.flatMap(line =>
      line.points.filter(([, y]) => y !== null).map(([x]) => x)));
    const span = zooms[this.x] || [-Infinity, Infinity];
    return [...found].filter(x => x >= span[0] && x <= span[1]).sort((a, b) => a - b);
  }

  moved(at) {
    if (this.drag && at) {
      this.drag.to = Math.min(Math.max(at[0], MEASURES.left), MEASURES.width - MEASURES.right);
      this.draw();
      return;
    }
    if (at === null || !this.xs) {
      if (this.drag === null) this.point(null);
      return;
    }
    const wanted = this.xs.value(at[0]);
    this.point(this.places.reduce((best, x) =>
      best === null || Math.abs(x - wanted) < Math.abs(best - wanted) ? x : best, null));
  }

  point(x) {
    this.cursorX = x;
    if (x === null) this.cursor.hide();
    else this.cursor.show(this.xs.place(x), this.rowsAt(x));
    this.draw();
  }

  rowsAt(x) {
    const rows = [];
    for (const line of this.shown) {
      const found = line.points.find(([place]) => place === x);
      if (found && found[1] !== null) rows.push([`${line.name}: ${short(found[1])}`, kindOf(line.color)]);
    }
    const most = 12;
    const more = rows.length > most ? [[`and ${rows.length - most} more`, null]] : [];
    const where = this.x === "s" ? `${short(x)} s` : `${short(x)} ${this.x}`;
    return [[where, null], ...rows.slice(0, most), ...more];
  }

  *cursorShapes() {
    const { top, bottom, height } = MEASURES;
    const at = this.xs.place(this.cursorX);
    yield shape("path", { class: "axis", d: `M${at} ${top}V${height - bottom}` });
    for (const line of this.shown) {
      const found = line.points.find(([x, y]) => x === this.cursorX && y !== null);
      if (!found || (this.isLog && found[1] <= 0)) continue;
      const cy = this.ys.place(found[1]);
      yield shape("circle", { class: `dot ${kindOf(line.color)}`, cx: at, cy, r: 3.2 });
    }
  }

  keyed(key) {
    if (!this.xs) return false;
    const places = this.places, here = places.indexOf(this.cursorX);
    const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (step && places.length) {
      const next = here < 0 ? (step < 0 ? places.length - 1 : 0) : here + step;
      this.point(places[Math.min(places.length - 1, Math.max(0, next))]);
    } else if (key === "l" && this.logButton) this.setLog(!this.isLog);
    else if (key === "+" || key === "-") this.zoomBy(key === "+" ? 0.5 : 2);
    else if (key === "0") this.zoom(null);
    else if (key === "Escape" && this.cursorX !== null) this.point(null);
    else return false;
    return true;
  }

  zoomBy(factor) {
    const all = this.lines.flatMap(line => line.points.map(([x]) => x));
    const end = Math.max(...all), { low, high } = this.xs;
    const middle = this.cursorX ?? (low + high) / 2, half = (high - low) * factor / 2;
    const span = [Math.max(0, middle - half), Math.min(end, middle + half)];
    this.zoom(span[0] <= 0 && span[1] >= end ? null : span);
  }

  pressed(event) {
    if (event.button || !this.xs) return;
    const [x] = this.cursor.at(event);
    if (x < MEASURES.left || x > MEASURES.width - MEASURES.right) return;
    this.drag = { from: x, to: x };
    this.plot.setPointerCapture(event.pointerId);
  }

  released(event) {
    if (!this.drag) return;
    const [from, to] = [this.drag.from, this.drag.to].sort((a, b) => a - b);
    this.drag = null;
    if (to - from > 8) this.zoom([this.xs.value(from), this.xs.value(to)]);
    else this.moved(this.cursor.at(event));
  }

  table() {
    const shown = this.lines.filter(line => line.points.some(([, y]) => y !== null));
    const cells = shown.map(line => new Map(line.points));
    const places = [...new Set(cells.flatMap(column => [...column.keys()]))].sort((a, b) => a - b);
    const rows = places.map(x => [short(x), ...cells.map(column => short(column.get(x) ?? null))])
      .filter(row => row.slice(1).some(cell => cell !== "-"));
    const marks = this.marks.map(([x, text]) => [short(x), text]);
    return {
      title: this.y ? `${this.title}: ${this.y}` : this.title,
      header: [this.x === "s" ? "s of training" : this.x, ...shown.map(line => line.name)],
      rows: [...rows, ...marks],
    };
  }
}

// What each row did when: rectangles of the parts of a step, side by side.
class Rows extends Figure {
  constructor(title, unit) {
    super(title, `${title}; its numbers are in the table below`);
    Object.assign(this, { unit, rows: [], steps: [] });
    this.cursor = new Cursor(this.plot, at => this.moved(at), key => this.keyed(key));
    this.chosen = null;
    this.legend.replaceChildren(...MEASURES.parts.map(part => make("li", {}, swatch(part), part)));
  }

  // steps: row, number, when it began, how long its parts took
  set(rows, steps) {
    this.rows = rows;
    this.steps = steps;
    this.chosen = null;
    this.update();
  }

  shapes() {
    const { right, width, top } = MEASURES;
    const row = this.rows.length > 16 ? 9 : MEASURES.row;
    const left = 64, height = top + row * Math.max(1, this.rows.length) + 34;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    if (!this.steps.length) {
      return [shape("text", { x: width / 2, y: height / 2, class: "mid" }, "nothing to show yet")];
    }
    const start = this.steps.reduce((least, step) => Math.min(least, step.start), Infinity);
    const end = this.steps.reduce((most, step) =>
      Math.max(most, step.start + step.parts.reduce((a, b) => a + b)), -Infinity);
    const xs = this.xs = new Scale(start, end, left, width - right);
    const found = [];
    const every = this.rows.length > 16 ? 4 : 1;
    this.rows.forEach((name, index) => {
      const y = top + row * index + row / 2 + 2;
      if (index % every === 0) found.push(shape("text", { x: left - 5, y, class: "end" }, name));
    });
    const paths = MEASURES.parts.map(() => []);
    for (const step of this.steps) {
      let at = step.start;
      const y = top + row * step.row, high = row - (row > 12 ? 4 : 2);
      step.parts.forEach((part, index) => {
        const from = xs.place(at), to = xs.place(at + part);
        if (part > 0) paths[index].push(`M${from} ${y}H${Math.max(to, from + 0.2)}v${high}H${from}Z`);
        at += part;
      });
    }
    MEASURES.parts.forEach((part, index) => {
      found.push(shape("path", { class: part, d: paths[index].join("") }));
    });
    for (const value of ticks(start, end, 5)) {
      if (value < start || value > end) continue;
      found.push(shape("text", { x: xs.place(value), y: height - 20, class: "mid" }, short(value)));
    }
    found.push(shape("text", {
      x: (left + width - right) / 2, y: height - 5, class: "mid name",
    }, "s of training"));
    this.row = row;
    return found;
  }

  moved(at) {
    if (at === null || !this.xs) {
      this.cursor.hide();
      return;
    }
    const row = Math.floor((at[1] - MEASURES.top) / this.row), x = this.xs.value(at[0]);
    const step = this.steps.find(each => each.row === row && x >= each.start
      && x < each.start + each.parts.reduce((a, b) => a + b));
    if (step) this.choose(this.steps.indexOf(step));
    else this.cursor.hide();
  }

  choose(index) {
    this.chosen = index;
    const step = this.steps[index];
    const rows = MEASURES.parts.map((part, i) => [`${part} ${this.amount(step, i)}`, part]);
    const title = `${this.rows[step.row]}, ${this.unit} ${step.number}, ${short(step.start)} s`;
    this.cursor.show(this.xs.place(step.start), [[title, null], ...rows]);
  }

  amount(step, index) {
    return step.shares ? `${step.shares[index]}%` : `${short(1000 * step.parts[index])} ms`;
  }

  keyed(key) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (!by || !this.steps.length) return false;
    const next = this.chosen === null ? 0 : this.chosen + by;
    this.choose(Math.min(this.steps.length - 1, Math.max(0, next)));
    return true;
  }

  table() {
    return {
      title: this.title,
      header: ["", this.unit, "began, s", ...MEASURES.parts],
      rows: this.steps.map(step => [
        this.rows[step.row], String(step.number), step.start.toFixed(3),
        ...MEASURES.parts.map((_, index) => this.amount(step, index)),
      ]),
    };
  }
}
