// Elements without markup in strings: every text goes through textContent, so that no name in a
// mesh can become an element or a script.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== undefined && child !== null && child !== false) element.append(child);
  }
  return element;
}

/** Makes an element; strings among the children become text. */
export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** As `h`, for SVG. */
export function svg(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

/** Sets an element's text, if it is another one. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Sets or removes an attribute, if that changes it. */
export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Brings the children of an element into line with a list, keeping those that are there. */
export function reconcile(parent, items, keyOf, make, update) {
  const known = parent.reconciled ?? (parent.reconciled = new Map());
  const seen = new Set();
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    if (seen.has(key)) continue;
    seen.add(key);
    let element = known.get(key);
    if (!element) known.set(key, (element = make(item)));
    update(element, item);
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
  }
  for (const [key, element] of known) {
    if (!seen.has(key)) {
      element.remove();
      known.delete(key);
    }
  }
}

/** Updates the children that are there, and leaves their order alone. */
export function refresh(parent, items, keyOf, update) {
  for (const item of items) {
    const element = parent.reconciled?.get(keyOf(item));
    if (element) update(element, item);
  }
}

let lastId = 0;

/** An id for a label or a description. */
export function freshId(prefix) {
  lastId += 1;
  return `${prefix}-${lastId}`;
}

/** A label around a control. */
export function field(label, control, hint) {
  const labelled = h("label", {}, h("span", {}, label), control);
  if (!hint) return h("div", { class: "field" }, labelled);
  const id = freshId("hint");
  control.setAttribute("aria-describedby", id);
  return h("div", { class: "field" }, labelled, h("small", { id, class: "muted" }, hint));
}

const toasts = document.getElementById("toasts");

/** Shows the messages in the dialog that was opened last, as what is outside it is inert, and above it. */
function placeToasts() {
  const parent = [...document.querySelectorAll("dialog[open]")].at(-1) ?? document.body;
  if (toasts.parentElement !== parent) parent.append(toasts);
  toasts.hidePopover();
  toasts.showPopover();
}

/** Shows a message for a while; screen readers say it. */
export function toast(text, kind = "") {
  const element = h("div", { class: `toast ${kind}` });
  placeToasts();
  toasts.append(element);
  // Screen readers say what is added to what they see.
  setText(element, text);
  setTimeout(() => {
    element.remove();
    if (!toasts.children.length) toasts.hidePopover();
  }, kind === "bad" ? 12000 : 6000);
}

/** A dialog with a heading and a close button; it is removed when it closes. */
export function dialog(title, ...children) {
  const id = freshId("dialog");
  const element = h("dialog", { "aria-labelledby": id },
    h("header", {},
      h("h2", { id }, title),
      h("button", { type: "button", class: "quiet", "aria-label": "Close", onclick: () => element.close() }, "✕")),
    ...children);
  element.addEventListener("close", () => {
    if (element.contains(toasts)) {
      placeToasts();
      if (!toasts.children.length) toasts.hidePopover();
    }
    element.remove();
  });
  element.addEventListener("click", (event) => {
    if (event.target === element) element.close();
  });
  document.body.append(element);
  element.showModal();
  return element;
}

/** Asks; resolves to whether the answer was yes. */
export function confirm(title, text, verb) {
  return new Promise((resolve) => {
    let answer = false;
    const yes = h("button", { type: "button", class: "primary", onclick: () => { answer = true; asked.close(); } }, verb);
    const asked = dialog(title, h("p", {}, text),
      h("footer", {}, h("button", { type: "button", onclick: () => asked.close() }, "Cancel"), yes));
    asked.addEventListener("close", () => resolve(answer));
    yes.focus();
  });
}
