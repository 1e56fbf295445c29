// How answers are made: sampling with presets, the system message, thinking, a form, tools.

import { shelf } from "./kept.js";

const PRESETS = [
  { name: "model", label: "The model's own", hint: "What the model's authors recommend.", values: {} },
  { name: "precise", label: "Precise", hint: "Always the likeliest token: facts, code, extraction.", values: { temperature: 0 } },
  { name: "balanced", label: "Balanced", hint: "Some choice among likely tokens.", values: { temperature: 0.7, top_p: 0.9 } },
  { name: "creative", label: "Creative", hint: "More surprise, without the unlikeliest tokens: stories, ideas.", values: { temperature: 1.1, min_p: 0.05 } },
];

const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 100, step: 0.1, help: "0 takes the likeliest token each time. Higher values choose unlikely tokens more often." },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05, help: "Chooses among the likeliest tokens that together have this probability." },
  { name: "top_k", label: "Top k", min: -1, step: 1, whole: true, help: "Chooses among this many of the likeliest tokens." },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, help: "Leaves out tokens below this share of the likeliest token's probability." },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, step: 0.05, help: "Above 1, tokens that occurred before become less likely." },
  { name: "max_tokens", label: "Tokens at most", min: 1, step: 1, whole: true, help: "The answer ends there. Empty: what is left of the context." },
  { name: "seed", label: "Seed", min: 0, step: 1, whole: true, help: "The same seed gives the same answer. Empty: another one each time." },
];

/** Return the name of the preset that has these values; "own" if none has. */
function presetOf(sampling = {}) {
  const chosen = Object.fromEntries(Object.entries(sampling).filter(([name]) => !["max_tokens", "seed", "stop"].includes(name)));
  const same = (values) => Object.keys(values).length === Object.keys(chosen).length && Object.entries(values).every(([name, value]) => chosen[name] === value);
  return PRESETS.find((one) => same(one.values))?.name ?? "own";
}

/** Return the fields of a request. Throws an Error that says which setting is wrong. */
export function requestFields(settings) {
  const found = { ...settings.sampling };
  const stop = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stop.length) found.stop = stop;
  if (settings.thinking === "on") found.enable_thinking = true;
  else if (settings.thinking === "off") found.enable_thinking = false;
  else if (settings.thinking) found.reasoning_effort = settings.thinking;
  if (settings.schema?.trim()) {
    const schema = parsed("The JSON schema", settings.schema, (value) => value && typeof value === "object" && !Array.isArray(value), "an object");
    found.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (settings.tools?.trim()) {
    const tools = parsed("The tools", settings.tools, Array.isArray, "a list");
    found.tools = tools.map((tool) => (tool?.function ? tool : { type: "function", function: tool }));
  }
  if (settings.more?.trim()) {
    const more = parsed("The further fields", settings.more, (value) => value && typeof value === "object" && !Array.isArray(value), "an object");
    const own = Object.keys(more).filter((name) => OWN.includes(name));
    if (own.length) throw new Error(`The further fields must not have ${own.join(", ")}, which the page sets. Mend them in the settings.`);
    Object.assign(found, more);
  }
  return found;
}

function parsed(what, text, fits, kind) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} cannot be read as JSON: ${error.message}. Mend or empty it in the settings.`);
  }
  if (!fits(value)) throw new Error(`${what} must be ${kind}. Mend or empty it in the settings.`);
  return value;
}

/** Return what a session is made with, so that its messages are written as they are when an answer is asked for. */
export function templateFields(settings) {
  const { tools, enable_thinking, reasoning_effort } = requestFields(settings);
  const variables = { ...(enable_thinking === undefined ? {} : { enable_thinking }), ...(reasoning_effort ? { reasoning_effort } : {}) };
  return { ...(tools ? { tools } : {}), ...(Object.keys(variables).length ? { chat_template_kwargs: variables } : {}) };
}

/** Fields of a request that are the page's. */
const OWN = ["messages", "prompt", "stream", "stream_options", "session_id", "n", "return_progress"];
/** The names that /props has for fields. */
const THEIRS = { repetition_penalty: "repeat_penalty" };
const MORE_EXAMPLE = '{"presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {"0": -100}}';
const TOOL_EXAMPLE = '[{"name": "weather", "description": "The weather in a city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]';
const SCHEMA_EXAMPLE = '{"type": "object", "properties": {"title": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}}, "required": ["title", "tags"]}';

/** The form of all settings. `changed(settings)` is called at each change. */
export class SettingsForm {
  constructor(app, changed) {
    this.app = app;
    this.changed = changed;
    this.settings = {};
    this.element = app.el("form.chat-settings", { onsubmit: (event) => event.preventDefault(), "aria-label": "Settings of the conversation" });
  }

  show(settings, { system }) {
    this.settings = structuredClone(settings);
    const { el, fill } = this.app;
    const s = this.settings;
    s.sampling ??= {};
    fill(
      this.element,
      this.own(),
      this.area("system", "System message", { value: system, rows: 3, help: "What the model is told before the first message. A change begins a new branch from the start." }),
      el("fieldset", {}, el("legend", {}, "Sampling"), this.presets(), el("div.fields", {}, FIELDS.map((field) => this.number(field)))),
      this.area("stop", "Stop texts", { value: s.stop ?? "", rows: 1, help: "The answer ends before one of these, a line each." }),
      this.thinking(),
      this.area("schema", "JSON schema", { value: s.schema ?? "", rows: 3, mono: true, example: SCHEMA_EXAMPLE, help: "The answer is JSON that fits this schema." }),
      this.area("tools", "Tools", { value: s.tools ?? "", rows: 3, mono: true, example: TOOL_EXAMPLE, help: "Functions that the model may call, as a JSON list. You write their results." }),
      this.area("more", "Further fields", { value: s.more ?? "", rows: 2, mono: true, example: MORE_EXAMPLE, help: "Fields of a chat request that have no place above, as a JSON object. The server refuses by name what it does not know how to do." }),
      this.hold(),
    );
    void this.showDefaults();
  }

  /** Show what counts where nothing is given. */
  async showDefaults() {
    this.defaults ??= this.app.get("props").then((found) => found.default_generation_settings.params);
    const params = await this.defaults.catch(() => ((this.defaults = undefined), {}));
    for (const { name } of FIELDS) {
      const value = params[THEIRS[name] ?? name];
      const input = this.element.querySelector(`[name=${name}]`);
      if (input && value !== undefined && !["seed", "max_tokens"].includes(name)) input.placeholder = String(value);
    }
  }

  note(name, value) {
    if (value === undefined || value === "") delete this.settings[name];
    else this.settings[name] = value;
    this.changed(this.settings, name);
  }

  /** Settings that were kept under a name: all of them, the system message too. */
  own() {
    const { el, icon, visible } = this.app;
    const kept = shelf("settings");
    const names = kept.all();
    const select = el("select.select", { id: "setting-own", disabled: !names.length }, el("option", { value: "" }, names.length ? "Choose…" : "None yet"), names.map(({ name }) => el("option", { value: name }, visible(name, 60))));
    const drop = el("button.icon-button", { type: "button", disabled: true, "aria-label": "Delete these settings", title: "Delete", onclick: () => (kept.drop(select.value), this.again()) }, icon("trash"));
    select.addEventListener("change", () => {
      const found = names.find((one) => one.name === select.value);
      drop.disabled = !found;
      if (!found) return;
      this.settings = structuredClone(found.value);
      this.changed(this.settings, "system");
      this.show(this.settings, { system: this.settings.system ?? "" });
      const anew = this.element.querySelector("#setting-own");
      anew.value = found.name;
      anew.closest(".own").querySelector(".icon-button").disabled = false;
      anew.focus();
    });
    const keep = async () => {
      const given = await this.app.ask("Keep these settings", [{ name: "name", label: "Name", value: select.value, required: true, hint: "One with this name is replaced." }], { action: "Keep" });
      if (!given) return;
      const system = this.element.querySelector("[name=system]").value;
      if (!kept.put(given.name.trim().slice(0, 80), { ...this.settings, system: system || undefined })) this.app.notify("The browser has no room for them", "error");
      this.again();
    };
    return el("div.setting.wide", {}, el("div.setting-head", {}, el("label", { for: "setting-own" }, "Kept settings"), el("button.button.small", { type: "button", onclick: keep }, icon("plus"), "Keep these…")), el("div.own", {}, select, drop));
  }

  again() {
    this.show(this.settings, { system: this.element.querySelector("[name=system]").value });
  }

  presets() {
    const { el } = this.app;
    const chosen = presetOf(this.settings.sampling);
    const hint = el("p.hint", {}, PRESETS.find((one) => one.name === chosen)?.hint ?? "Values of your own.");
    const button = (preset) =>
      el("button.button.small", { type: "button", "aria-pressed": String(preset.name === chosen), onclick: () => this.take(preset) }, preset.label);
    return el("div.presets", { role: "group", "aria-label": "Presets" }, el("div.preset-buttons", {}, PRESETS.map(button)), hint);
  }

  take(preset) {
    const { max_tokens, seed } = this.settings.sampling;
    const kept = Object.fromEntries(Object.entries({ max_tokens, seed }).filter(([, value]) => value !== undefined));
    this.note("sampling", { ...preset.values, ...kept });
    this.again();
    this.element.querySelector(".presets [aria-pressed=true]")?.focus();
  }

  number({ name, label, min, max, step, whole, help }) {
    const { el } = this.app;
    const id = `setting-${name}`;
    const input = el("input.input", { id, name, type: "number", min, max, step, inputmode: whole ? "numeric" : "decimal", value: this.settings.sampling[name] ?? "", placeholder: "default", "aria-describedby": `${id}-help` });
    input.addEventListener("change", () => {
      const { sampling } = this.settings;
      const value = input.value.trim() === "" ? undefined : Number(input.value);
      input.setAttribute("aria-invalid", String(input.validity.badInput || (value !== undefined && whole && !Number.isInteger(value))));
      if (input.getAttribute("aria-invalid") === "true") return;
      if (value === undefined) delete sampling[name];
      else sampling[name] = value;
      this.note("sampling", { ...sampling });
      this.element.querySelector(".presets").replaceWith(this.presets());
    });
    return el("div.setting", {}, el("label", { for: id }, label), input, el("p.hint", { id: `${id}-help` }, help));
  }

  area(name, label, { value, rows, help, mono = false, example = "" }) {
    const { el } = this.app;
    const id = `setting-${name}`;
    const area = el("textarea.textarea", { id, name, rows, value, class: mono ? "mono" : "", spellcheck: mono ? "false" : "true", dir: mono ? "ltr" : "auto", "aria-describedby": `${id}-help` });
    area.addEventListener("change", () => this.note(name, area.value));
    const fillIn = example && el("button.button.small", { type: "button", onclick: () => ((area.value = JSON.stringify(JSON.parse(example), null, 2)), this.note(name, area.value)) }, "Example");
    return el("div.setting.wide", {}, el("div.setting-head", {}, el("label", { for: id }, label), fillIn), area, el("p.hint", { id: `${id}-help` }, help));
  }

  thinking() {
    const { el } = this.app;
    const options = [["", "as the model does by itself"], ["on", "on"], ["off", "off"], ["low", "low effort"], ["medium", "medium effort"], ["high", "high effort"]];
    const select = el("select.select", { id: "setting-thinking", "aria-describedby": "setting-thinking-help" }, options.map(([value, label]) => el("option", { value, selected: value === (this.settings.thinking ?? "") }, label)));
    select.addEventListener("change", () => this.note("thinking", select.value));
    return el("div.setting.wide", {}, el("label", { for: "setting-thinking" }, "Thinking"), select, el("p.hint", { id: "setting-thinking-help" }, "Some models think before they answer; the server says if this one cannot be told so."));
  }

  hold() {
    const { el, overview } = this.app;
    const off = !overview?.allow_edits;
    const box = el("input", { type: "checkbox", id: "setting-hold", checked: !off && this.settings.hold !== false, disabled: off, "aria-describedby": "setting-hold-help" });
    box.addEventListener("change", () => this.note("hold", box.checked ? undefined : false));
    const why = off
      ? "The server was started without --allow-edits. Branches then find their beginning in the prefix cache."
      : "Each answer is a session that shares its pages with the others; see History. Without it, branches find their beginning in the prefix cache.";
    return el("div.setting.wide", {}, el("div.check", {}, box, el("label", { for: "setting-hold" }, "Hold branches as sessions")), el("p.hint", { id: "setting-hold-help" }, why));
  }
}
