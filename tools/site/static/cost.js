// The page "What will it cost me?": hours and dollars of a training run, from the stored tables.
// The same sums and ranges as run_cost in tpu_time/fit.py.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("cost-data").textContent);
  const form = document.getElementById("cost");
  const prices = {};  // what the reader typed, by slice
  const asked = new URLSearchParams(location.hash.slice(1));  // cost.html#model=e2b&slice=v6e-1

  function cost(row, tokens, price) {
    const size = data.checkpointGb[row.model] / data.gbPerS / 60;
    const steps = Math.floor(tokens / row.stepTokens);
    const validations = Math.floor(steps / data.every) + 2;  // the first and the last step's, too
    const saves = Math.floor(steps / row.saveEvery) + 1;
    const work = validations * data.heldOut * row.length * data.fill * row.forward;
    const minutes = {
      "download the base": size,
      "load it onto the chips": size,
      "compile": data.compileMinutes,
      "optimizer steps": tokens / row.speed / 60,
      "validate": work / row.speed / 60,
      "save": saves * data.savedGb[row.model] / data.gbPerS / 60,
      "answer before and after": row.answers};
    const parts = Object.entries(minutes).map(([name, middle]) => {
      const known = row.assumed[name];  // how far an assumed part may be off; else by tpu_time/bands.py
      const [low, high] = known ?? (row.predicted ? [1 / data.miss, data.miss * row.slowed] : [1, Infinity]);
      const from = known || row.predicted ? data.whereFrom[name] : "at least: no time is predicted";
      return {name, low: middle * low, high: middle * high, from};
    });
    const ends = [parts.reduce((sum, part) => sum + part.low, 0) / 60];
    if (row.predicted) ends.push(parts.reduce((sum, part) => sum + part.high, 0) / 60);
    const text = (unit, digits) => (row.predicted ? "" : "≥ ") +
        ends.map(end => (end * unit).toFixed(digits)).join(" to ");
    return {parts, hours: text(1, 2), dollars: price === null ? "" : text(price, 1)};
  }

  function range(part) {
    const low = part.low.toFixed(1);
    return part.high === Infinity ? `≥ ${low}` : `${low} to ${part.high.toFixed(1)}`;
  }

  function fill(table, rows) {
    const body = table.querySelector("tbody");
    body.replaceChildren(...rows.map(cells => {
      const line = document.createElement("tr");
      line.append(...cells.map(text => {
        const cell = document.createElement("td");
        cell.textContent = text;
        return cell;
      }));
      return line;
    }));
  }

  function update(event) {
    const want = name => form.elements[name].value;
    const tokens = Math.max(0, Number(want("amount"))) *
        (want("unit") === "examples" ? Math.max(0, Number(want("each"))) : 1);
    const rows = data.rows.filter(row => row.model === want("model") && row.base === want("base"));
    const named = event ? want("slice") : asked.get("slice");
    const chosen = (rows.find(row => row.slice === named) ?? rows[0]).slice;
    form.elements.slice.replaceChildren(...rows.map(row => new Option(row.slice, row.slice)));
    form.elements.slice.value = chosen;
    if (event && event.target.name === "price") prices[chosen] = Number(want("price"));
    const priceOf = row => prices[row.slice] ?? row.price;
    const row = rows.find(row => row.slice === chosen);
    if (!event || event.target.name !== "price")
      form.elements.price.value = priceOf(row) === null ? "" : priceOf(row).toFixed(2);
    fill(document.getElementById("cost-slices"), rows.map(row => {
      const sum = cost(row, tokens, priceOf(row));
      return [row.slice, row.fits ? "yes" : "no",
        `${row.gib.toFixed(1)} of ${row.limit.toFixed(1)}, ${row.compiled ? "compiled" : "estimated"}`,
        row.fits ? {NONE: "nothing", BLOCK: "blocks", DECODER: "layers"}[row.remat] : "",
        row.fits ? row.pace : "",
        row.fits ? sum.hours : "", row.fits ? sum.dollars : ""];
    }));
    const sum = cost(row, tokens, priceOf(row));
    document.getElementById("cost-title").textContent = row.fits
      ? `${chosen}: ${sum.hours} hours, ${sum.dollars || "unknown"} dollars for` +
        ` ${tokens.toLocaleString("en-US")} tokens` : `${chosen} does not hold it.`;
    fill(document.getElementById("cost-parts"),
         row.fits ? sum.parts.map(part => [part.name, range(part), part.from]) : []);
  }

  for (const [name, value] of asked) {
    if (name in form.elements && name !== "slice") form.elements[name].value = value;
  }
  if (asked.has("price") && asked.has("slice")) prices[asked.get("slice")] = Number(asked.get("price"));
  form.addEventListener("input", update);
  form.addEventListener("submit", event => event.preventDefault());
  update();
})();
