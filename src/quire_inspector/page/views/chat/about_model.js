// What answers: the model, its sizes, its formats and its template.

/**
 * Show it in a dialog.
 * @param {object} app
 */
export async function aboutModel(app) {
  const { el, named, format, visible, overview } = app;
  try {
    const [{ data }, props] = await Promise.all([app.get("v1/models"), app.get("props")]);
    const { model, layers = [] } = overview;
    const kinds = new Map();
    for (const { kind, window } of layers) {
      const name = window ? `${kind}, windows of ${format.number(window)}` : kind;
      kinds.set(name, (kinds.get(name) ?? 0) + 1);
    }
    const adapters = data.filter((one) => one.parent);
    const facts = [
      ["Name", named(model.name)],
      ["Context", format.count(model.max_length, "token")],
      ["Vocabulary", format.count(model.vocab_size, "token")],
      ["Layers", [...kinds].map(([name, count]) => `${count} ${name}`).join("; ")],
      ["Weights", data[0]?.weight_formats?.join(", ")],
      ["Computes in", model.dtype],
      ["Adapters", adapters.length ? adapters.map((one) => visible(one.id, 60)).join(", ") : null],
      ["Tools", props.chat_template_caps.supports_tools ? "the template can offer them" : "the template does not know them"],
    ];
    const rows = facts.filter(([, value]) => value).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
    const template = el("details.about-template", {}, el("summary", {}, "Chat template"), el("pre.tokens", { tabindex: "0", dir: "ltr" }, props.chat_template));
    await app.openDialog("About the model", () => el("div.dialog-body", {}, el("dl.facts", {}, rows), template));
  } catch (error) {
    app.fail(error);
  }
}
