// Images that go with the next message of a chat.

import { h } from "./dom.js";
import { count } from "./format.js";

const TYPES = ["image/jpeg", "image/png", "image/webp", "image/gif"];

const size = (bytes) => (bytes < 1048576 ? `${count(Math.ceil(bytes / 1024))} KiB` : `${count(Math.floor(bytes / 1048576))} MiB`);

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error(`${file.name} cannot be read`)));
    reader.readAsDataURL(file);
  });
}

/** A row of thumbnails, with buttons to `remove` one if that is given. */
export function thumbnails(images, remove) {
  return images.map((image) => h("figure", { class: "thumbnail" },
    h("img", { src: image.url, alt: image.name, title: image.name }),
    remove && h("button", { type: "button", "aria-label": `Remove ${image.name}`, onclick: () => remove(image) }, "✕")));
}

/**
 * A button that takes files, and what is pasted into or dropped on `area`. `limitsOf` returns the bounds of images, or
 * null where no model takes any; `tell` shows a problem, or none: "".
 */
export class Attachments {
  constructor(area, limitsOf, tell) {
    this.images = [];
    this.limitsOf = limitsOf;
    this.tell = tell;
    this.shown = h("div", { class: "thumbnails", role: "group", "aria-label": "Images of the message", hidden: true });
    const files = h("input", { type: "file", accept: TYPES.join(), multiple: true, hidden: true, "aria-label": "Images" });
    this.button = h("button", { type: "button", onclick: () => files.click() }, "Add images");
    this.element = h("span", {}, files, this.button);
    files.addEventListener("change", () => {
      this.add([...files.files]);
      // The same file may be chosen again.
      files.value = "";
    });
    area.addEventListener("paste", (event) => {
      const pasted = [...event.clipboardData.files];
      if (!pasted.length) return;
      event.preventDefault();
      this.add(pasted);
    });
    for (const kind of ["dragenter", "dragover"]) {
      area.addEventListener(kind, (event) => {
        if (![...event.dataTransfer.types].includes("Files")) return;
        event.preventDefault();
        area.classList.add("dropping");
      });
    }
    area.addEventListener("dragleave", (event) => {
      if (!area.contains(event.relatedTarget)) area.classList.remove("dropping");
    });
    area.addEventListener("drop", (event) => {
      area.classList.remove("dropping");
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  /** Adds files, up to the first that is refused. */
  async add(files) {
    this.tell("");
    try {
      for (const file of files) {
        this.check(file);
        const image = { name: file.name || "image", bytes: file.size, url: "" };
        this.images.push(image);
        try {
          image.url = await read(file);
        } catch (error) {
          this.images.splice(this.images.indexOf(image), 1);
          throw error;
        }
      }
    } catch (error) {
      this.tell(error.message);
    }
    this.show();
  }

  check(file) {
    const limits = this.limitsOf();
    if (!limits) throw new Error("This model takes no images.");
    if (!TYPES.includes(file.type)) throw new Error(`${file.name}: an image must be JPEG, PNG, WebP or GIF.`);
    if (file.size > limits.max_file_bytes) throw new Error(`${file.name} has ${size(file.size)}; a file may have ${size(limits.max_file_bytes)}.`);
    if (this.images.length >= limits.max_images) throw new Error(`A request may have ${count(limits.max_images)} images.`);
    const bytes = this.images.reduce((sum, image) => sum + image.bytes, file.size);
    if (bytes > limits.max_bytes) throw new Error(`The images of a request may have ${size(limits.max_bytes)} together.`);
  }

  show() {
    this.shown.hidden = !this.images.length;
    this.shown.replaceChildren(...thumbnails(this.images.filter((image) => image.url), (image) => {
      this.images.splice(this.images.indexOf(image), 1);
      this.show();
    }));
  }

  /** The images, which are removed from here. */
  take() {
    const taken = this.images;
    this.images = [];
    this.show();
    return taken;
  }

  get isReading() { return this.images.some((image) => !image.url); }
}
