"use strict";
// Filters choose a scene, and every chart is drawn from it. Text from the history goes in as text, never as markup.

const FILTERS = [
  ["device", "Device"], ["topology", "Topology"], ["world_size", "Ranks"], ["collective", "Collective"],
  ["dtype", "Type"], ["op", "Operation"], ["mode", "Mode"], ["place", "Place"],
];
const COLLATOR = new Intl.Collator("en", { numeric: true });
const SIMULATED = "simulated: Triton's interpreter on a CPU";
const TITLES = {
  latency: "Latency", bandwidth: "Bus bandwidth", speedup: "Speed-up", picks: "What selection picks", past: "History",
  skew: "Skew of ranks", bytes: "Bytes against the bound",
};
const page = { data: null, text: "", chosen: {}, hidden: new Set(), scene: null };
const find = (selector, from = document) => from.querySelector(selector);

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  Object.assign(made, attributes);
  return made;
}

async function unpack(text) {
  const raw = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// A device's simulated and measured times are two values of its filter: no choice shows both.
function value(scene, name) {
  return name === "device" ? `${scene.device}${scene.simulated ? ` (${SIMULATED})` : ""}` : String(scene[name]);
}

function options(name) {
  const before = FILTERS.slice(0, FILTERS.findIndex(([n]) => n === name));
  const fits = page.data.scenes.filter((scene) => before.every(([n]) => value(scene, n) === page.chosen[n]));
  const values = [...new Set(fits.map((scene) => value(scene, name)))];
  return values.sort(COLLATOR.compare);
}

// From the first filter on, so that what is chosen exists; a value that is gone gives way to the first that there is.
function settle() {
  for (const [name] of FILTERS) {
    const values = options(name);
    if (!values.includes(page.chosen[name])) page.chosen[name] = values[0];
    const select = find(`#filter-${name}`);
    select.replaceChildren(...values.map((v) => element("option", v === "" ? "(unknown)" : v, { value: v, selected: v === page.chosen[name] })));
    select.disabled = values.length < 2;
  }
  page.scene = page.data.scenes.find((scene) => FILTERS.every(([name]) => value(scene, name) === page.chosen[name]));
}

function makeFilters() {
  const form = find("#filters");
  for (const [name, label] of FILTERS) {
    const select = element("select", undefined, { id: `filter-${name}` });
    select.addEventListener("change", () => {
      page.chosen[name] = select.value;
      show();
    });
    const around = element("label", label);
    around.append(select);
    form.append(around);
  }
  form.append(element("fieldset", undefined, { id: "lines" }));
  form.addEventListener("submit", (event) => event.preventDefault());
}

function makeLines() {
  const boxes = page.scene.lines.map((line) => {
    const box = element("input", undefined, { type: "checkbox", checked: !page.hidden.has(line.kernel) });
    box.addEventListener("change", () => {
      page.hidden[box.checked ? "delete" : "add"](line.kernel);
      draw();
    });
    const around = element("label");
    around.append(box, line.kernel);
    return around;
  });
  find("#lines").replaceChildren(element("legend", "Lines"), ...boxes);
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  return { front: style.getPropertyValue("--front").trim(), line: style.getPropertyValue("--line").trim() };
}

function mark(scene) {
  return scene.simulated ? ` (${SIMULATED})` : "";
}

function chart(name, { traces, layout, note }) {
  const scene = page.scene, section = find(`#${name}`), narrow = section.clientWidth < 480;
  const where = `${scene.collective} ${scene.dtype}, ${scene.world_size} ranks, ${scene.mode}`;
  find("h2", section).textContent = `${TITLES[name]}: ${where}${mark(scene)}`;
  if (note !== undefined) find("p", section).textContent = note;
  const { front, line } = colours(), place = find(".chart", section);
  place.hidden = traces.every((trace) => trace.x.length === 0);
  if (place.hidden) return Plotly.purge(place);
  const axis = (given) => ({ gridcolor: line, zerolinecolor: line, ...given, title: { font: { size: 12 }, ...given.title } });
  const { xaxis = {}, yaxis = {}, ...rest } = layout;
  const title = { text: `${TITLES[name]}${scene.simulated ? " (simulated)" : ""}`, font: { size: 13 }, x: 0, xanchor: "left", xref: "paper" };
  const { sizes, ...sizeless } = xaxis;
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", `${TITLES[name]} of ${scene.lines.length} lines${mark(scene)}`);
  Plotly.react(place, traces, {
    title, font: { color: front, size: narrow ? 10 : 12 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", modebar: { bgcolor: "rgba(0,0,0,0)", color: front, activecolor: front },
    margin: { l: narrow ? 48 : 64, r: 12, t: 36, b: 48 }, showlegend: traces.length > 1,
    legend: { orientation: "h", y: -0.25, font: { size: narrow ? 9 : 11 } }, xaxis: axis(sizeless), yaxis: axis(yaxis), ...rest,
  }, { responsive: true, displaylogo: false, displayModeBar: !narrow, modeBarButtons: [["toImage", "resetScale2d"]] });
}

function fill(select, pairs, wanted) {
  const kept = pairs.some(([v]) => v === wanted) ? wanted : pairs[0][0];
  select.replaceChildren(...pairs.map(([v, text]) => element("option", text, { value: v, selected: v === kept })));
  return kept;
}

function drawPast() {
  const scene = page.scene, lines = find("#past-line"), sizes = find("#past-size");
  const number = Number(fill(lines, scene.lines.map((line, i) => [String(i), line.kernel]), lines.value));
  const line = scene.lines[number];
  const index = line.size.indexOf(Number(fill(sizes, line.size.map((size) => [String(size), bytes(size)]), sizes.value)));
  chart("past", past(scene, line, index, page.data.runs));
}

function draw() {
  const scene = page.scene, all = scene.lines.map((line, i) => [i, line]);
  const lines = all.filter(([, line]) => !page.hidden.has(line.kernel));
  chart("latency", latency(scene, lines));
  chart("bandwidth", bandwidth(scene, lines));
  chart("speedup", speedup(scene, lines));
  chart("picks", picks(scene));
  chart("skew", skew(scene, lines));
  chart("bytes", bound(scene, lines));
  drawPast();
}

function table(section, heads, rows) {
  const head = element("tr");
  head.append(...heads.map((text) => element("th", text, { scope: "col" })));
  const body = rows.map((cells) => {
    const row = element("tr");
    row.append(...cells.map((cell) => {
      if (cell instanceof Node) return cell;
      const plainCell = element("td", typeof cell === "number" ? cell.toLocaleString("en") : cell ?? "");
      if (typeof cell === "number") plainCell.className = "number";
      return plainCell;
    }));
    return row;
  });
  find("table", section).replaceChildren(head, ...body);
}

function jump(scene, number, size) {
  const cell = element("td"), button = element("button", "show", { type: "button" });
  button.addEventListener("click", () => {
    for (const [name] of FILTERS) page.chosen[name] = value(scene, name);
    show();
    find("#past-line").value = String(number);
    drawPast();
    find("#past-size").value = String(size);
    drawPast();
    find("#past").scrollIntoView();
    find("#past-line").focus();
  });
  cell.append(button);
  return cell;
}

function showChanges() {
  const found = [];
  for (const scene of page.data.scenes.filter((s) => s.simulated === page.scene.simulated)) {
    scene.lines.forEach((line, number) => line.changes.forEach((list, i) => list.forEach(([at, before, after]) => {
      found.push({ scene, line, number, size: line.size[i], run: page.data.runs[line.run[i][at]], before, after, step: after / before });
    })));
  }
  const far = (change) => Math.abs(Math.log(change.step));
  found.sort((a, b) => far(b) === far(a) ? 0 : far(b) - far(a));
  const section = find("#changes");
  const [few, points] = page.data.unjudged;
  section.hidden = found.length === 0 && few === 0;
  find("p", section).textContent = `${found.length ? "Every point of the history whose level has changed, largest step first. A button shows it. " : ""}A step shows about 7 runs after it.${few ? ` ${few} of ${points} points of the latest runs have too few runs to judge.` : ""}`;
  find(".wide", section).hidden = found.length === 0;
  find("h2", section).textContent = !found.length ? `Changes${mark(page.scene)}: none found` : `Changes${mark(page.scene)}: ${found.filter((c) => c.step > 1).length} slower, ${found.filter((c) => c.step <= 1).length} faster${found.length > 100 ? "; the 100 largest" : ""}`;
  const cells = found.slice(0, 100).map((c) => {
    const percent = element("td", Number.isFinite(c.step) ? `${c.step > 1 ? "+" : ""}${((c.step - 1) * 100).toFixed(1)} %` : "from 0", { className: c.step > 1 ? "slower" : "" });
    return [jump(c.scene, c.number, c.size), percent, c.before, c.after, c.run[0], c.run[1] || "-", `${c.scene.collective} ${c.scene.dtype}`, c.line.kernel, bytes(c.size), value(c.scene, "device"), c.scene.world_size];
  });
  table(section, ["", "step", "before (us)", "after (us)", "from", "commit", "what", "line", "size", "device", "ranks"], cells);
}

function showJobs() {
  const rows = page.data.jobs, section = find("#jobs");
  section.hidden = rows.length === 0;
  find("p", section).textContent = "What jobs started with TRICOMM_STATS have done so far; times of the calls that TRICOMM_STATS_EVERY has chosen.";
  table(section, ["job", "group", "route", "collective", "kernel", "up to", "calls", "bytes", "p50 (us)", "p99 (us)", "waited (s)"], rows.map((r) => [
    r.job, r.group ? `${r.group}${r.simulated ? " (simulated)" : ""}` : "", r.route, r.collective, r.kernel, r.bucket === undefined ? "" : bytes(r.bucket),
    r.calls, r.nbytes, r.p50, r.p99, r.seconds,
  ]));
}

function show() {
  const { data } = page, empty = data.scenes.length === 0;
  find("#empty").hidden = !empty;
  find("#charts").hidden = find("#filters").hidden = empty;
  find("#about").textContent = `${data.rows.toLocaleString("en")} rows of ${data.runs.length} runs${data.source ? ` in ${data.source}` : ""}, ${data.made}`;
  showJobs();
  if (empty) return;
  settle();
  find("#what").textContent = page.scene.simulated ? SIMULATED : "measured";
  document.title = `tricomm${mark(page.scene)}`;
  makeLines();
  draw();
  showChanges();
}

async function take(text) {
  if (text === page.text) return;
  page.text = text;
  page.data = await unpack(text);
  if (!page.chosen.device && page.data.scenes.length) {
    const first = page.data.scenes.reduce((a, b) => (b.lines.length >= a.lines.length ? b : a));
    for (const [name] of FILTERS) page.chosen[name] = value(first, name);
  }
  show();
}

async function renew() {
  try {
    const answer = await fetch("data", { cache: "no-store" });
    if (answer.ok) await take(await answer.text());
  } catch {
    find("#about").textContent = "The server has ended; this is what it said last.";
  }
}

makeFilters();
find("#past-line").addEventListener("change", drawPast);
find("#past-size").addEventListener("change", drawPast);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.scene && draw());
take(find("#data").textContent).then(() => document.body.setAttribute("data-ready", ""));
if (Number(document.body.dataset.renew)) setInterval(renew, Number(document.body.dataset.renew) * 1000);
