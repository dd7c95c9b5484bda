// Runs the script of a page with a document of four elements, clicks, and prints what each click told.
// node click.mjs PAGE '[[layout, row, column], ...]'
import fs from "node:fs";
import vm from "node:vm";

const page = fs.readFileSync(process.argv[2], "utf8");
const [, data] = page.match(/<script id="pictures" type="application\/json">([^]*?)<\/script>/);
const [, script] = page.match(/<script>([^]*?)<\/script>/);

class Element {
  constructor() { this.textContent = ""; this.value = "0"; this.children = []; this.handlers = {}; this.drawn = []; }
  addEventListener(what, handler) { this.handlers[what] = handler; }
  appendChild(child) { this.children.push(child); }
  getContext() {
    return { fillRect: () => {}, strokeRect: (...at) => this.drawn.push(at),
             fillText: (text, x, y) => this.texts.push([text, x, y]) };
  }
  set width(n) { this.drawn = []; this.texts = []; this.wide = n; }
  get width() { return this.wide; }
}

const elements = Object.fromEntries(["layouts", "size", "text", "cells", "told", "pictures"].map(id => [id, new Element()]));
elements.pictures.textContent = data;
const document = { getElementById: id => elements[id], createElement: () => new Element() };
vm.runInNewContext(script, { document });

const told = JSON.parse(process.argv[3]).map(([layout, row, column]) => {
  elements.layouts.value = String(layout);
  elements.layouts.handlers.change();
  const { rows, columns } = JSON.parse(data)[layout];
  const width = elements.cells.width / columns, height = elements.cells.height / rows;
  elements.cells.handlers.click({ offsetX: (column + 0.5) * width, offsetY: (row + 0.5) * height });
  return { told: elements.told.textContent, text: elements.text.textContent, outlined: elements.cells.drawn.length,
           label: elements.cells.texts[row * columns + column][0] };
});
console.log(JSON.stringify({ told, options: elements.layouts.children.map(c => c.textContent) }));
