// Apply the chosen theme before anything is drawn. A classic script, so that it runs before the first paint.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("quire.theme");
  } catch {
    // Storage may be forbidden; the system's theme counts then.
  }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
})();
