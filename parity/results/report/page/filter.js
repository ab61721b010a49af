const rows = [...document.querySelectorAll("[data-loss]")], names = ["library", "loss", "dtype", "verdict"];
const words = (row, name) => row.dataset[name].split(" ").filter(Boolean);
const form = document.createElement("form"), told = document.createElement("output"), text = document.createElement("input");
for (const name of names) {
  const choice = document.createElement("select");
  choice.name = choice.ariaLabel = name;
  choice.add(new Option(`any ${name}`, ""));
  [...new Set(rows.flatMap((row) => words(row, name)))].sort().forEach((value) => choice.add(new Option(value)));
  form.append(choice);
}
Object.assign(text, { type: "search", placeholder: "text", ariaLabel: "text" });
form.append(text, told);
form.className = "filter";
form.onsubmit = () => false;
form.oninput = () => {
  const asked = names.map((name) => [name, form[name].value]).filter(([, value]) => value), word = text.value.toLowerCase();
  for (const row of rows) {
    const fits = asked.every(([name, value]) => !words(row, name).length || words(row, name).includes(value));
    row.hidden = !fits || !row.textContent.toLowerCase().includes(word);
  }
  document.querySelectorAll("details.group").forEach((group) => (group.open = asked.length > 0 || word !== ""));
  told.value = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
};
document.querySelector("nav").after(form);
