// The sampling fields that all branches of the Playground run with. What is left empty, the model's
// generation_config.json says.

const STORED = "quire.sampling";

const FIELDS = [
  { name: "temperature", label: "Temperature", step: 0.1, min: 0, max: 100, value: "0.8" },
  { name: "top_p", label: "Top p", step: 0.05, min: 0, max: 1, value: "" },
  { name: "max_tokens", label: "Tokens at most", step: 1, min: 1, value: "32", whole: true },
  { name: "seed", label: "Seed", step: 1, min: 0, value: "", whole: true },
];

export class Sampling {
  /** @param {object} app */
  constructor(app) {
    const { el } = app;
    const kept = read();
    this.inputs = new Map();
    const field = ({ name, label, step, min, max, value }) => {
      const input = el("input.input", {
        type: "number",
        id: `sampling-${name}`,
        name,
        step,
        min,
        max,
        value: kept[name] ?? value,
        placeholder: "default",
        inputmode: "decimal",
        oninput: () => this.keep(),
      });
      this.inputs.set(name, input);
      return el("div.sampling-field", {}, el("label", { for: input.id }, label), input);
    };
    const fields = el("div.sampling", { role: "group", "aria-label": "Sampling, of all branches" }, FIELDS.map(field));
    // A fold, so that small screens keep their room for the branches.
    const wide = matchMedia("(min-width: 761px)");
    this.element = el("details.sampling-fold", { open: wide.matches }, el("summary", {}, "Sampling"), fields);
    wide.addEventListener("change", () => (this.element.open = wide.matches), { signal: app.signal });
  }

  /** Return the fields of a request. Throws an Error that names the first that is no number. */
  values() {
    const found = {};
    for (const { name, label, whole } of FIELDS) {
      const input = this.inputs.get(name);
      if (input.validity.badInput) throw new Error(`${label}: this is no number`);
      if (input.value.trim() === "") continue;
      const value = Number(input.value);
      if (whole && !Number.isInteger(value)) throw new Error(`${label}: ${input.value} is not whole`);
      found[name] = value;
    }
    return found;
  }

  keep() {
    const values = Object.fromEntries([...this.inputs].map(([name, input]) => [name, input.value]));
    try {
      localStorage.setItem(STORED, JSON.stringify(values));
    } catch {
      // The fields then last until the page is left.
    }
  }
}

function read() {
  try {
    return JSON.parse(localStorage.getItem(STORED) ?? "{}") ?? {};
  } catch {
    return {};
  }
}
