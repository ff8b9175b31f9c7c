/* The chosen theme, set before the first paint so that nothing flashes. */
const chosen = localStorage.getItem("warmgate-theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
