// Tables and words.

function bytes(count) {
  if (!count) return "-";
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (count >= size) return `${short(count / size)} ${unit}`;
  }
  return `${short(count)} bytes`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function whole(count) {
  return count === null || count === undefined ? "-" : Math.round(count).toLocaleString("en-US");
}

function counted(number, what) {
  return `${number} ${what}${number === 1 ? "" : "s"}`;
}

// A table whose cells change in place, so that nothing in it loses the focus. A cell is text, or an
// element, which stays once it is there; `key` tells rows apart.
class Table {
  constructor(header, caption = "", kind = "") {
    this.body = make("tbody");
    this.head = make("tr");
    this.rows = new Map();
    this.table = make("table", { class: kind }, ...(caption ? [make("caption", { text: caption })] : []),
      make("thead", {}, this.head), this.body);
    this.element = make("div", { class: "wide", tabindex: 0 }, this.table);
    this.setHeader(header);
  }

  setHeader(header) {
    const text = header.join("\n");
    if (text === this.header) return;
    this.header = text;
    this.head.replaceChildren(...header.map(name => make("th", { text: name, scope: "col" })));
  }

  set(rows) {
    const keys = new Set(rows.map(([key]) => String(key)));
    for (const [key, row] of this.rows) {
      if (!keys.has(key)) {
        row.remove();
        this.rows.delete(key);
      }
    }
    rows.forEach(([key, ...cells], index) => this.setRow(String(key), cells, index));
  }

  setRow(key, cells, index) {
    let row = this.rows.get(key);
    if (!row) {
      row = make("tr", {}, ...cells.map(() => make("td")));
      this.rows.set(key, row);
    }
    if (this.body.children[index] !== row) this.body.insertBefore(row, this.body.children[index] || null);
    cells.forEach((cell, at) => {
      const place = row.children[at];
      if (cell instanceof Node) {
        if (place.firstChild !== cell) place.replaceChildren(cell);
      } else if (place.textContent !== cell) place.textContent = cell;
    });
  }

  has(key) {
    return this.rows.has(String(key));
  }
}

// The numbers of plots, written out while somebody looks at them.
class Numbers {
  constructor(plots) {
    this.plots = plots;
    this.place = make("div");
    this.element = make("details", { class: "numbers", ontoggle: () => this.update() },
      make("summary", { text: "The numbers" }), this.place);
  }

  update() {
    if (!this.element.open || this.element.matches(":hover, :focus-within") && this.place.firstChild) {
      return;  // it does not move under somebody who reads
    }
    this.place.replaceChildren(...this.plots.map(plot => {
      const { title, header, rows } = plot.table();
      const made = new Table(header, title);
      made.set(rows.map((row, index) => [index, ...row]));
      return made.element;
    }));
  }
}
