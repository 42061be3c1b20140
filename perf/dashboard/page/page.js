"use strict";
// Filters choose a scene, and every chart is drawn from it. Text from the history goes in as text, never as markup.

const FILTERS = [
  ["device", "Device"], ["topology", "Topology"], ["world_size", "Ranks"], ["collective", "Collective"],
  ["dtype", "Type"], ["op", "Operation"], ["mode", "Mode"], ["place", "Place"],
];
const COLLATOR = new Intl.Collator("en", { numeric: true });
const SIMULATED = "simulated: Triton's interpreter on a CPU";
const page = { data: null, text: "", chosen: {}, hidden: new Set(), scene: null, first: 0, last: 0 };
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
    const values = options(name), select = find(`#filter-${name}`);
    if (!values.includes(page.chosen[name])) page.chosen[name] = values[0];
    select.replaceChildren(...values.map((v) => element("option", v === "" ? "(unknown)" : v, { value: v, selected: v === page.chosen[name] })));
    select.parentElement.hidden = values.length < 2;
  }
  const dates = page.data.runs.map(([date]) => date), from = find("#from").value, to = find("#to").value;
  page.first = from ? dates.findIndex((date) => date >= from) : 0;
  page.last = to ? dates.findLastIndex((date) => date.slice(0, 10) <= to) : dates.length - 1;
  if (page.first < 0) page.first = dates.length;
  page.scene = windowed(page.data.scenes.find((scene) => FILTERS.every(([name]) => value(scene, name) === page.chosen[name])));
}

// The scene as runs `page.first` to `page.last` have measured it: its lines and sizes in them, with their latest times.
function windowed(scene) {
  const lines = scene.lines.map((line, number) => {
    const cut = { ...line, number, size: [], predicted: [], run: [], past: [], p99: [], skew: [], changes: [] };
    line.size.forEach((size, i) => {
      const kept = line.run[i].map((run, at) => [run, at]).filter(([run]) => run >= page.first && run <= page.last).map(([, at]) => at);
      if (!kept.length) return;
      for (const name of ["run", "past", "p99", "skew"]) cut[name].push(kept.map((at) => line[name][i][at]));
      cut.size.push(size);
      cut.predicted.push(line.predicted[i]);
      cut.changes.push(line.changes[i].filter(([at]) => kept.includes(at)).map(([at, ...times]) => [at - kept[0], ...times]));
    });
    return { ...cut, p50: cut.past.map((times) => times.at(-1)) };
  });
  return { ...scene, lines: lines.filter((line) => line.size.length) };
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
  for (const [name, label] of [["from", "From (UTC)"], ["to", "To (UTC)"]]) {
    const input = element("input", undefined, { id: name, type: "date" }), around = element("label", label);
    input.addEventListener("change", show);
    around.append(input);
    form.append(around);
  }
  form.addEventListener("submit", (event) => event.preventDefault());
}

function makeLines() {
  const boxes = page.scene.lines.map((line) => {
    const box = element("input", undefined, { type: "checkbox", checked: !page.hidden.has(line.kernel) });
    box.style.accentColor = style(line.number).colour;
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

function chart(name, { traces, layout, note }, simulated = page.scene.simulated) {
  const section = find(`#${name}`), width = section.clientWidth, narrow = width < 480;
  const heading = find("h2, h3", section);
  heading.textContent = heading.textContent.replace(" (simulated)", "") + (simulated ? " (simulated)" : "");
  if (note !== undefined) find("p", section).textContent = note;
  const { front, line } = colours(), place = find(".chart", section), clear = "rgba(0,0,0,0)";
  place.hidden = traces.every((trace) => trace.x.length === 0);
  if (place.hidden) return Plotly.purge(place);
  const axis = ({ title, ...given }) => ({
    gridcolor: line, zerolinecolor: line, automargin: true, ticks: "outside", ticklen: 4, tickcolor: clear,
    title: { font: { size: 12 }, standoff: 10, ...title }, ...given,
  });
  const { xaxis = {}, yaxis = {}, ...rest } = layout;
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", heading.textContent);
  // A picture that is saved has no heading, so that the plot says itself that it is simulated.
  const mark = { text: "simulated", xref: "paper", yref: "paper", x: 0, y: 1, xanchor: "left", yanchor: "bottom", showarrow: false };
  Plotly.react(place, traces, {
    font: { color: front, size: narrow ? 11 : 12 }, paper_bgcolor: clear, plot_bgcolor: clear, hovermode: "closest",
    modebar: { bgcolor: clear, color: front, activecolor: front }, margin: { l: 48, r: 12, t: narrow ? 20 : 30, b: 36 },
    legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom", font: { size: 11 } }, showlegend: traces.length > 1,
    annotations: simulated ? [mark] : [], xaxis: axis(xaxis), yaxis: axis(yaxis), ...rest,
  }, { responsive: true, displaylogo: false, displayModeBar: !narrow, modeBarButtons: [["toImage", "resetScale2d"]] });
}

function fill(select, pairs, wanted) {
  const kept = pairs.some(([v]) => v === wanted) ? wanted : pairs[0]?.[0];
  select.replaceChildren(...pairs.map(([v, text]) => element("option", text, { value: v, selected: v === kept })));
  return kept;
}

function drawPast() {
  const scene = page.scene, lines = find("#past-line"), sizes = find("#past-size");
  const number = fill(lines, scene.lines.map((line) => [String(line.number), line.kernel]), lines.value);
  const line = scene.lines.find((l) => String(l.number) === number);
  if (!line) return chart("past", { traces: [], layout: {} });
  const index = line.size.indexOf(Number(fill(sizes, line.size.map((size) => [String(size), bytes(size)]), sizes.value)));
  chart("past", past(scene, line, index, page.data.runs));
}

function draw() {
  const scene = page.scene, lines = scene.lines.filter((line) => !page.hidden.has(line.kernel)), { runs } = page.data;
  const model = ` Dotted: the cost model's fastest kernel, with a median error of ${Math.round(page.data.model_error * 100)} %.`;
  const modelled = sizesOf(scene.lines).some((size) => predicted(scene, size) !== null);
  find("#latency p").textContent = `Median of the slowest rank; the band reaches to the 99th per cent.${modelled ? model : ""}`;
  for (const [name, make] of Object.entries({ latency, bandwidth, speedup, skew, bytes: bound })) {
    chart(name, make(scene, lines, runs, find(`#${name}`).clientWidth));
  }
  drawPicks(scene);
  drawPast();
}

function table(place, heads, rows) {
  const head = element("tr");
  head.append(...heads.map((text) => element("th", text, { scope: "col" })));
  const body = rows.map((cells) => {
    const row = element("tr");
    row.append(...cells.map((cell) => {
      if (cell instanceof Node) return cell;
      return element("td", typeof cell === "number" ? cell.toLocaleString("en") : cell ?? "", { className: typeof cell === "number" ? "number" : "" });
    }));
    return row;
  });
  find("table", place).replaceChildren(head, ...body);
}

// Neighbouring sizes with the same answer share a row.
function drawPicks(scene) {
  const rows = [], all = picks(scene), known = all.filter(({ picked }) => picked);
  for (const { size, picked, fastest, loss } of all) {
    const row = rows.at(-1), lost = loss === null ? "?" : loss ? percent(loss) : "none";
    if (row && row.picked === picked && row.fastest === fastest && row.lost === lost) row.to = size;
    else rows.push({ from: size, to: size, picked, fastest, lost, bad: loss > LOSS });
  }
  const differ = known.filter(({ picked, fastest }) => picked !== fastest).length;
  find("#picks h2").textContent = `Selected kernels${scene.simulated ? " (simulated)" : ""}`;
  find("#picks p").textContent = known.length
    ? `Selection picks another kernel than the fastest measured at ${differ} of ${known.length} sizes (?: the pick was not measured). tricomm tune moves the picks.`
    : "The selection on this box is not known: the history has no facts of it. tricomm bench writes them.";
  find("#picks .wide").hidden = !rows.length;
  table(find("#picks"), ["size", "picked", "fastest", "loss"], rows.map(({ from, to, picked, fastest, lost, bad }) => [
    (from === to ? [from] : [from, to]).map((size) => bytes(size).replace(" ", "\u00a0")).join(" to "),
    picked ?? "not known", fastest, element("td", lost, { className: bad ? "slower" : "" }),
  ]));
}

function showTiles(changed, late) {
  const since = (page.data.runs[page.first] ?? [""])[0].slice(0, 10);
  find("#tiles").replaceChildren(...headlines(page.scene, changed, late, since).map(({ title, value: text, note }) => {
    const tile = element("div");
    tile.append(element("h2", title + (page.scene.simulated ? " (simulated)" : "")), element("strong", text), element("p", note));
    return tile;
  }));
}

function jump({ scene, number, size }, text) {
  const button = element("button", text, { type: "button", title: "Show its history" });
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
  return button;
}

// Changes by line of a chart, in one item the sizes of a line; they come with the largest step first.
function event(changes, open, title) {
  const around = element("details", undefined, { open }), list = element("ul");
  around.append(element("summary", title), list);
  list.append(...grouped(changes, (c) => `${page.data.scenes.indexOf(c.scene)} ${c.number} ${c.step > 1}`).map((points) => {
    const [largest] = points, { scene, line, step, size, before, after } = largest, item = element("li");
    const sizes = points.map((c) => c.size).sort((a, b) => a - b), several = sizes.length > 1;
    const name = `${line.kernel} ${bytes(sizes[0])}${several ? ` to ${bytes(sizes.at(-1))}` : ""}`;
    item.append(element("span", Number.isFinite(step) ? percent(step - 1) : "from 0", { className: step > 1 ? "slower" : "faster" }));
    item.append(jump(largest, several ? `${name}, ${sizes.length} sizes` : name));
    item.append(element("span", `${short(before)} to ${short(after)} us${several ? ` at ${bytes(size)}` : ""}`));
    const device = new Set(page.data.scenes.map((s) => s.device)).size > 1 ? `, ${scene.device}` : "";
    item.append(element("span", `${scene.collective} ${scene.dtype}, ${scene.world_size} ranks, ${scene.mode}, ${scene.place}${device}`));
    return item;
  }));
  return around;
}

function showChanges() {
  const { data, scene, first, last } = page, [few, points] = data.unjudged;
  const [found, recent] = ["changes", "unproven"].map((kind) => steps(data, scene, kind, first, last));
  const late = [
    recent.length ? `${recent.length} of ${points} points took longer in the latest runs than in any before; too recent to judge. ` : "",
    few ? `${few} of ${points} points of the latest runs have too few runs to judge.` : "",
  ].join("");
  const judged = !few && 10 * recent.length <= points, changed = found.length || judged ? counted(found) : "not judged yet";
  showTiles(changed, late || `of ${points} points in the latest runs`);
  find("#changes").hidden = false;
  find("#changes h2").textContent = `Changes${mark(scene)}: ${changed}`;
  find("#changes p").textContent = `A step shows about 7 runs after it. ${late}`;
  const key = [data.rows, first, last, scene.simulated].join(), list = find("#events");
  if (list.dataset.key === key) return; // what a reader has opened stays open while a job writes
  list.dataset.key = key;
  const places = grouped(found, (c) => `${data.runs[c.run][0].slice(0, 10)} ${c.old} ${data.runs[c.run][1]}`).map((changes, i) => {
    const [date, commit] = data.runs[changes[0].run], { old } = changes[0];
    const commits = old === commit ? `commit ${commit || "unknown"}` : `commits ${old || "?"}..${commit || "?"}`;
    return event(changes, i === 0, `${ago(date, data.made)} (${minute(date)}), ${commits}: ${counted(changes)}`);
  });
  if (recent.length) places.unshift(event(recent, !places.length, "Too recent to judge; measure again"));
  list.replaceChildren(...places);
}

function showJobs() {
  const { jobs, rates: rated = [], waits: waiting = [], straggler } = page.data, section = find("#jobs");
  section.hidden = rated.length === 0;
  if (section.hidden) return;
  find("p", section).textContent = straggler;
  const simulated = rated.some((job) => job.name.endsWith("(simulated)")), running = rated.filter((job) => job.points.length);
  chart("rates", rates(running), simulated);
  chart("waits", waiting.length ? waits(waiting[0], find("#waits").clientWidth) : { traces: [], layout: {}, note: "No rank has waited." }, simulated);
  table(section, ["job", "group", "route", "collective", "kernel", "up to", "calls", "bytes", "p50 (us)", "p99 (us)"], jobs.map((r) => [
    r.job, r.group && `${r.group} rank ${r.rank} of ${r.world_size}${r.simulated ? " (simulated)" : ""}`, r.route, r.collective,
    r.algorithm && `${r.algorithm}/${r.protocol}`, bytes(r.bucket), r.calls, r.nbytes, r.p50_us, r.p99_us,
  ]));
}

function show() {
  const { data } = page, empty = data.scenes.length === 0;
  find("#empty").hidden = !empty;
  find("#charts").hidden = find("#filters").hidden = find("#scene").hidden = find("#tiles").hidden = empty;
  const source = data.source ? ` in ${data.source}` : "", latest = empty ? "" : `, the latest ${ago(data.runs.at(-1)[0], data.made)}`;
  const rows = `${data.rows.toLocaleString("en")} rows of ${data.runs.length} run${data.runs.length === 1 ? "" : "s"}`;
  find("#about").textContent = [`${rows}${source}${latest}; page of ${minute(data.made)} UTC.`, ...data.notes].join(" ");
  showJobs();
  if (empty) return;
  settle();
  find("#what").textContent = page.scene.simulated ? SIMULATED : "measured";
  document.title = `tricomm${mark(page.scene)}`;
  const { collective, dtype, op, world_size: ranks, mode, place, device, topology } = page.scene;
  const box = topology ? `${device}, ${topology}` : device;
  find("#scene h2").textContent = `${collective} ${dtype}, ${op}, ${ranks} ranks, ${mode}, ${place}, on ${box}${mark(page.scene)}`;
  makeLines();
  draw();
  showChanges();
}

async function take(text) {
  if (text === page.text) return;
  page.text = text;
  page.data = await unpack(text);
  if (!page.chosen.device && page.data.scenes.length) {
    const first = page.data.scenes.reduce((a, b) => (b.lines.length > a.lines.length ? b : a));
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
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.data && show());
take(find("#data").textContent).then(() => document.body.setAttribute("data-ready", ""));
if (Number(document.body.dataset.renew)) setInterval(renew, Number(document.body.dataset.renew) * 1000);
