// Where messages are written: kept in the browser until they are sent, with files, for one branch or two.

import { drafts } from "./kept.js";
import { Prompts } from "./prompts.js";

/** Characters of one file at most. */
const LARGEST = 2_000_000;
/** Characters of a pasted text from which it becomes a file. */
const PASTED = 8_000;

/** Files that hold no text, by their types and names, and what helps. */
const KINDS = [
  [/^image\/(?!svg)/, /\.(png|jpe?g|gif|webp|heic|bmp|tiff?)$/i, "is a picture; the models here read text"],
  [/^(audio|video)\//, /\.(mp3|wav|ogg|m4a|mp4|mov|webm)$/i, "is a recording; the models here read text"],
  [/^application\/pdf$/, /\.pdf$/i, "is a PDF; copy its text and paste it here, or convert it first, as pdftotext does"],
  [/officedocument|opendocument|msword|ms-excel|ms-powerpoint/, /\.(docx?|xlsx?|pptx?|od[tsp])$/i, "is an office document; save it as text, Markdown or CSV first"],
];

/** Let an area be as high as its text, up to a share of the window, where the browser does not do so itself. */
export function grow(area, share) {
  if (CSS.supports("field-sizing", "content")) return;
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight * share)}px`;
}

export class Composer {
  /** @param {object} chat the view */
  constructor(chat) {
    this.chat = chat;
    this.app = chat.app;
    const { el, icon } = this.app;
    this.files = [];
    this.place = "";
    this.area = el("textarea.textarea.ask", { rows: 1, placeholder: "Message", "aria-label": "Message", dir: "auto", "aria-describedby": "ask-hint" });
    this.area.addEventListener("input", () => this.changed());
    this.area.addEventListener("paste", (event) => this.pasted(event));
    this.fileList = el("ul.ask-files", { "aria-label": "Attached files" });
    this.input = el("input", { type: "file", multiple: true, hidden: true, tabindex: "-1", "aria-hidden": "true" });
    this.input.addEventListener("change", () => this.attach([...this.input.files]));
    this.count = el("select.select.small", { "aria-label": "Answers at once", title: "Answers at once" }, [1, 2, 3, 4, 6, 8].map((n) => el("option", { value: n }, n === 1 ? "1 answer" : `${n} answers`)));
    this.sendButton = el("button.icon-button.send", { type: "submit", "aria-label": "Send", title: "Send (Enter)" }, icon("send"));
    this.stopButton = el("button.icon-button.send.stop", { type: "button", hidden: true, "aria-label": "Stop", title: "Stop (Escape)", onclick: () => this.chat.stop() }, icon("stop"));
    this.tokens = el("span.context");
    this.prompts = new Prompts(this);
    this.promptButton = el("button.icon-button", { type: "button", "aria-label": "Prompts", title: "Prompts (/ in an empty field)", onclick: () => this.prompts.open() }, icon("book"));
    this.element = el(
      "form.ask-form",
      { onsubmit: (event) => (event.preventDefault(), this.send()) },
      this.fileList,
      this.area,
      el(
        "div.ask-row",
        {},
        el("button.icon-button", { type: "button", "aria-label": "Attach text files", title: "Attach text files", onclick: () => this.input.click() }, icon("attach")),
        this.input,
        this.promptButton,
        this.count,
        this.tokens,
        el("span.spacer"),
        el("span.hint.sr-only", { id: "ask-hint" }, "Enter sends, Shift and Enter begins a line"),
        this.stopButton,
        this.sendButton,
      ),
    );
    this.app.keys(this.area, {
      Enter: (event) => (event.isComposing || this.isTouch ? false : this.send()),
      "Control+Enter": () => this.send(),
      Escape: () => this.chat.stop() || this.chat.leaveField(),
      ArrowUp: () => (this.area.value === "" ? this.chat.editLast() : false),
    });
    this.area.addEventListener("keydown", (event) => {
      if (event.key !== "/" || this.area.value || event.isComposing || !this.prompts.any) return;
      event.preventDefault();
      this.prompts.open();
    });
  }

  /** Take files that are dropped anywhere on an element, over which `shade` then lies. */
  takeDrops(root, shade) {
    const show = (on) => (shade.hidden = !on);
    const listen = (name, does) =>
      root.addEventListener(name, (event) => {
        if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
        event.preventDefault();
        does(event);
      });
    listen("dragover", () => show(true));
    listen("dragleave", (event) => root.contains(event.relatedTarget) || show(false));
    listen("drop", (event) => {
      show(false);
      void this.attach([...event.dataTransfer.files]);
    });
  }

  /** On phones, Enter begins a line. */
  get isTouch() {
    return matchMedia("(pointer: coarse) and (max-width: 760px)").matches;
  }

  focus() {
    this.area.focus();
  }

  get hasDraft() {
    return this.area.value.trim() !== "" || this.files.length > 0;
  }

  /** Show what was typed for a conversation and not sent. */
  open(place) {
    this.place = place;
    const draft = drafts.get(place);
    this.area.value = draft.text;
    this.files = draft.files ?? [];
    this.drawFiles();
    this.fit();
    if (this.hasDraft) this.chat.countSoon();
  }

  changed() {
    this.fit();
    this.save();
  }

  /** Put a text where the cursor stands. */
  insert(text) {
    this.focus();
    this.area.setRangeText(text, this.area.selectionStart, this.area.selectionEnd, "end");
    this.changed();
  }

  save({ files = false } = {}) {
    const kept = files ? drafts.putFiles(this.place, this.files) : drafts.put(this.place, this.area.value);
    this.chat.countSoon();
    if (!kept && !this.warned) this.app.notify("The browser has no room to keep what you type; it is lost if the page is closed", "error");
    this.warned = !kept;
  }

  fit() {
    grow(this.area, 0.4);
  }

  /** A long text that is pasted becomes a file, so that the message stays readable. */
  pasted(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length) {
      event.preventDefault();
      void this.attach(files);
      return;
    }
    const text = event.clipboardData?.getData("text/plain") ?? "";
    if (text.length < PASTED) return;
    event.preventDefault();
    this.addFile(`pasted-${this.files.length + 1}.txt`, text);
    this.app.announce("The pasted text is attached as a file");
  }

  async attach(files) {
    this.input.value = "";
    for (const file of files) {
      if (/\.quire$/i.test(file.name)) {
        await this.chat.exchange.take(file);
        continue;
      }
      const [, , why] = KINDS.find(([type, name]) => type.test(file.type) || name.test(file.name)) ?? [];
      const text = why ? "" : await file.text();
      if (why || /\u0000|\ufffd{3}/.test(text.slice(0, 10_000))) this.app.notify(`${this.app.visible(file.name, 80)} ${why ?? "is no text file"}.`, "error");
      else this.addFile(file.name, text);
    }
    this.focus();
  }

  addFile(name, text) {
    if (text.length > LARGEST) {
      this.app.notify(`${this.app.visible(name, 80)} has ${this.app.format.bytes(text.length)}; at most ${this.app.format.bytes(LARGEST)} can be attached`, "error");
      return;
    }
    this.files.push({ name, text });
    this.drawFiles();
    this.save({ files: true });
  }

  drawFiles() {
    const { el, fill, icon, named, format } = this.app;
    const remove = (at) => () => {
      this.files.splice(at, 1);
      this.drawFiles();
      this.save({ files: true });
      this.focus();
    };
    fill(this.fileList, this.files.map(({ name, text }, at) => el("li.ask-file", {}, icon("attach"), named(name), el("span.hint", {}, format.bytes(text.length)), el("button.icon-button.small", { type: "button", "aria-label": `Remove ${this.app.visible(name, 60)}`, onclick: remove(at) }, icon("close")))));
    this.fileList.hidden = !this.files.length;
  }

  send() {
    const text = this.area.value.trim();
    if (!text && !this.files.length) return;
    if (this.app.connection === "lost") return void this.app.notify("The server cannot be reached. Your text is kept; send it when the server is back.", "error");
    if (!this.chat.ask(text, this.files, Number(this.count.value))) return;
    this.area.value = "";
    this.files = [];
    drafts.drop(this.place);
    this.drawFiles();
    this.fit();
  }

  /** Tell whether something runs, and how full the context is. */
  state({ running, used, about, total, sides }) {
    this.stopButton.hidden = !running;
    this.sendButton.hidden = running;
    this.area.placeholder = sides > 1 ? "Message to both branches" : "Message";
    const { el, fill, format } = this.app;
    if (!total) return fill(this.tokens);
    const share = Math.min(1, used / total);
    const with_ = about ? "with what you are writing, " : "";
    this.tokens.title = used > total ? `${with_}the conversation has more tokens than the ${format.number(total)} of the context` : `${with_}${format.number(used)} of ${format.number(total)} tokens of the context are used; ${format.number(total - used)} are left`;
    this.tokens.classList.toggle("full", share > 0.9);
    const shown = used === Infinity ? "too long" : `${format.short(used)} / ${format.short(total)}`;
    return fill(this.tokens, el("span.meter", { "aria-hidden": "true" }, el("span", { style: { width: `${share * 100}%` } })), el("span", {}, shown), el("span.sr-only", {}, " tokens of the context"));
  }
}
