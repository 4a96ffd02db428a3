// As much of a document as markdown.js needs, so that it can be tried without a browser.

class FakeNode {
  constructor(name) {
    this.tagName = name.toUpperCase();
    this.childNodes = [];
    this.dataset = {};
    this.parent = null;
  }

  append(...children) {
    for (const child of children) {
      this.childNodes.push(child);
      if (child instanceof FakeNode) child.parent = this;
    }
  }

  remove() {
    const all = this.parent.childNodes;
    all.splice(all.lastIndexOf(this), 1);
  }

  setAttribute() {}

  /** Tags and texts, such as <P>a<EM>b</EM></P>. */
  get markup() {
    const inside = this.childNodes.map((child) => (typeof child === "string" ? child : child.markup));
    return `<${this.tagName}>${inside.join("")}</${this.tagName}>`;
  }
}

const document = { createElement: (name) => new FakeNode(name) };
