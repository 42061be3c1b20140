"use strict";
// One function per chart: a scene of the history and the pixels for it in, traces and layout for Plotly out. Nothing
// here touches the page.

// Okabe and Ito's colours, which people who see few colours tell apart; symbols differ, too.
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon"];
const GREY = "#888888";
const LABEL = 58; // pixels of "256 KiB" and the gap after it

// Plotly takes some markup in every text, and what comes from the history is text only.
function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function bytes(size) {
  for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (size >= unit) return `${+(size / unit).toPrecision(3)} ${name}`;
  }
  return `${size} B`;
}

// A date of the history to the minute.
function minute(date) {
  return date.slice(0, 16).replace("T", " ");
}

function style(number) {
  return { colour: COLOURS[number % COLOURS.length], symbol: SYMBOLS[number % SYMBOLS.length] };
}

function short(number) {
  return number === null ? "?" : number.toLocaleString("en", { maximumSignificantDigits: 3 });
}

// The values that a logarithmic axis of `pixels` has room for, each with a label of `wide` pixels.
function roomy(values, pixels, wide) {
  const range = Math.log(values.at(-1) / values[0]) || 1, shown = [];
  for (const value of values) {
    if (!shown.length || (Math.log(value / shown.at(-1)) / range) * pixels >= wide) shown.push(value);
  }
  return shown;
}

function sizesOf(lines) {
  return [...new Set(lines.flatMap((line) => line.size))].filter((size) => size > 0).sort((a, b) => a - b);
}

function sizeAxis(scene, width) {
  const sizes = sizesOf(scene.lines), shown = sizes.length ? roomy(sizes, width - 100, LABEL) : [];
  return { type: "log", tickvals: shown, ticktext: shown.map(bytes), tickangle: 0 };
}

function logAxis(title, traces) {
  const values = traces.flatMap((trace) => trace.y).filter((value) => value > 0);
  if (!values.length) return { type: "log", title: { text: title } };
  const least = Math.min(...values), most = Math.max(...values), round = [];
  for (let power = Math.floor(Math.log10(least)); power <= Math.log10(most); power += 1) {
    round.push(...[1, 2, 5].map((n) => n * 10 ** power));
  }
  const inside = round.filter((value) => value >= least / 1.2 && value <= most * 1.2);
  const shown = inside.length > 1 ? roomy(inside, 200, 24) : [least, most];
  return { type: "log", tickvals: shown, ticktext: shown.map(short), title: { text: title } };
}

function busbw(scene, size, time) {
  return time > 0 ? (size / time / 1e3) * scene.bus : null;
}

// The tooltip of a point of a line, in its run number `at` of this window.
function told(scene, runs, line, i, at = line.run[i].length - 1) {
  const [date, commit] = runs[line.run[i][at]], time = line.past[i][at], rate = busbw(scene, line.size[i], time);
  return [
    `<b>${plain(line.kernel)}, ${bytes(line.size[i])}</b>`, `${time} us, p99 ${line.p99[i][at]} us, skew ${line.skew[i][at]} us`,
    `${short(rate)} GB/s bus bandwidth`, `${plain(minute(date))}, commit ${plain(commit || "unknown")}`,
    `${plain(scene.device.slice(0, 40))}${scene.simulated ? " (simulated)" : ""}`,
  ].join("<br>");
}

function curve(scene, runs, line, y) {
  const { colour, symbol } = style(line.number);
  return {
    type: "scatter", mode: "lines+markers", name: plain(line.kernel), x: line.size, y, legendgroup: String(line.number),
    line: { color: colour }, marker: { color: colour, symbol, size: 7 },
    text: line.size.map((_, i) => told(scene, runs, line, i)), hovertemplate: "%{text}<extra></extra>",
  };
}

function latency(scene, lines, runs, width) {
  const traces = lines.flatMap((line) => [
    curve(scene, runs, line, line.p50),
    {
      type: "scatter", mode: "lines", x: line.size, y: line.p99.map((times) => times.at(-1)), fill: "tonexty", line: { width: 0 },
      fillcolor: style(line.number).colour + "22", hoverinfo: "skip", showlegend: false, legendgroup: String(line.number), name: plain(line.kernel) + " p99",
    },
  ]);
  const model = sizesOf(scene.lines).map((size) => [size, predicted(scene, size)]).filter(([, time]) => time !== null);
  if (model.length) {
    traces.push({
      type: "scatter", mode: "lines", name: "predicted", x: model.map(([size]) => size), y: model.map(([, time]) => time),
      line: { dash: "dot", color: GREY, width: 3 }, text: model.map(([size]) => bytes(size)), hovertemplate: "predicted, %{text}: %{y:.4g} us<extra></extra>",
    });
  }
  return { traces, layout: { xaxis: sizeAxis(scene, width), yaxis: logAxis("time (us)", traces) } };
}

// The cost model's time of the kernel here that it takes for the fastest.
function predicted(scene, size) {
  const times = scene.lines.map((line) => line.predicted[line.size.indexOf(size)] ?? null).filter((time) => time !== null);
  return times.length ? Math.min(...times) : null;
}

function bandwidth(scene, lines, runs, width) {
  const traces = lines.map((line) => curve(scene, runs, line, line.size.map((size, i) => busbw(scene, size, line.p50[i]))));
  const sizes = sizesOf(scene.lines);
  if (scene.link_gbs !== null && sizes.length) {
    traces.push({
      type: "scatter", mode: "lines", name: "what links carry", hovertemplate: "links: %{y:.4g} GB/s<extra></extra>",
      x: [sizes[0], sizes.at(-1)], y: [scene.link_gbs, scene.link_gbs], line: { dash: "dash", color: GREY },
    });
  }
  return {
    traces, layout: { xaxis: sizeAxis(scene, width), yaxis: logAxis("bus bandwidth (GB/s)", traces) },
    note: scene.link_gbs === null ? "This device's links are not known, so there is no limit to draw."
      : `The dashed line is ${scene.link_gbs} GB/s, what NCCL takes these GPUs' links to carry.`,
  };
}

function at(line, size) {
  return line.p50[line.size.indexOf(size)] ?? null;
}

// Another library's times where there are any, else those of the kernel that selection picks.
function baseline(scene) {
  const other = ["nccl", "symm_mem", "gloo"].map((name) => scene.lines.find((line) => line.library === name)).find(Boolean);
  if (other) return { name: other.kernel, library: true, of: (size) => at(other, size) };
  const picked = (size) => scene.lines.find((line) => line.kernel === scene.picks[size]);
  return { name: "the kernel that selection picks", library: false, of: (size) => (picked(size) ? at(picked(size), size) : null) };
}

function speedup(scene, lines, runs, width) {
  const sizes = sizesOf(scene.lines), base = baseline(scene);
  const ratios = lines.map((line) => sizes.map((size) => {
    const mine = at(line, size), theirs = base.of(size);
    return mine && theirs ? theirs / mine : null;
  }));
  const log = ratios.map((row) => row.map((ratio) => (ratio === null ? null : Math.log2(ratio))));
  const most = Math.max(0.25, ...log.flat().filter((v) => v !== null).map(Math.abs));
  const wide = (width - (width > 480 ? 220 : 150)) / Math.max(1, sizes.length), step = Math.max(1, Math.ceil(LABEL / wide)), names = sizes.map(bytes);
  const trace = {
    type: "heatmap", x: names, y: lines.map((line) => plain(line.kernel)), z: log, zmin: -most, zmax: most,
    colorscale: [[0, "#d55e00"], [0.5, "#f7f7f7"], [1, "#0072b2"]], xgap: 1, ygap: 1, text: ratios.map((row) => row.map((r) => (r === null ? "" : r.toFixed(2)))),
    texttemplate: wide >= 34 ? "%{text}" : undefined, hovertemplate: "%{y}, %{x}: %{text} times as fast<extra></extra>",
    colorbar: {
      ...(width > 480 ? {} : { orientation: "h", y: -0.15, yanchor: "top" }), thickness: 12,
      tickvals: [-most, 0, most], ticktext: [-most, 0, most].map((v) => `${(2 ** v).toFixed(2)}x`),
    },
  };
  return {
    traces: [trace], note: `The baseline's median over a line's, 2 being twice as fast. The baseline is ${base.name}.`,
    layout: {
      xaxis: { type: "category", tickvals: names.filter((_, i) => i % step === 0), tickangle: 0 },
      yaxis: { type: "category", autorange: "reversed" },
    },
  };
}

function past(scene, line, i, runs) {
  const { colour } = style(line.number), times = line.past[i];
  const x = line.run[i].map((run) => runs[run][0]), text = times.map((_, at) => told(scene, runs, line, i, at));
  const traces = [{
    type: "scatter", mode: "lines+markers", name: plain(line.kernel), x, y: times, text, line: { color: colour },
    marker: { color: colour, size: 6 }, hovertemplate: "%{text}<extra></extra>",
  }];
  for (const [name, colour, symbol, wanted] of [["slower", "#d55e00", "triangle-up", (b, a) => a > b], ["faster", "#009e73", "triangle-down", (b, a) => a <= b]]) {
    const found = line.changes[i].filter(([, before, after]) => wanted(before, after));
    if (!found.length) continue;
    traces.push({
      type: "scatter", mode: "markers", name, x: found.map(([at]) => x[at]), y: found.map(([at]) => times[at]),
      marker: { color: colour, symbol, size: 15, line: { width: 1, color: "#000000" } },
      text: found.map(([at, before, after]) => `${name}: ${short(before)} to ${short(after)} us<br>${text[at]}`), hovertemplate: "%{text}<extra></extra>",
    });
  }
  return { traces, layout: { xaxis: { type: "date", nticks: 5, tickangle: 0 }, yaxis: { title: { text: "time (us)" }, rangemode: "tozero", nticks: 6 } } };
}

function skew(scene, lines, runs, width) {
  const traces = lines.map((line) => curve(scene, runs, line, line.skew.map((times) => times.at(-1))));
  return { traces, layout: { xaxis: sizeAxis(scene, width), yaxis: { title: { text: "skew (us)" }, rangemode: "tozero", nticks: 6 } } };
}

function bound(scene, lines) {
  const known = lines.filter((line) => line.moved !== null);
  const trace = {
    type: "bar", orientation: "h", x: known.map((line) => line.moved), y: known.map((line) => plain(line.kernel)),
    text: known.map((line) => line.moved.toFixed(2)), textposition: "outside", hovertemplate: "%{y}: %{x:.3f} times the bound<extra></extra>",
    marker: { color: known.map((line) => style(line.number).colour) },
  };
  const mark = { type: "line", x0: 1, x1: 1, yref: "paper", y0: 0, y1: 1, line: { dash: "dash", color: GREY } };
  const xaxis = { title: { text: "bytes over the bound" }, range: [0, 1.15 * Math.max(1, ...known.map((line) => line.moved))], nticks: 6 };
  return {
    traces: [trace], layout: { shapes: [mark], xaxis, yaxis: { type: "category", autorange: "reversed" } },
    note: known.length ? "Bytes to and from peers over the least that any algorithm needs; 1 is that bound."
      : "None of these lines is a kernel of tricomm's, whose bytes are counted.",
  };
}

function rates(jobs) {
  const traces = jobs.map((job, number) => ({
    type: "scatter", mode: "lines+markers", name: plain(job.name), line: { color: style(number).colour },
    x: job.points.map(([at]) => new Date(at * 1000)), y: job.points.map(([, , gbs]) => gbs),
    text: job.points.map(([, calls, gbs]) => `${plain(job.name)}<br>${short(gbs)} GB/s of input, ${short(calls)} calls/s`), hovertemplate: "%{text}<extra></extra>",
  }));
  return {
    traces, layout: { xaxis: { type: "date", nticks: 4, tickangle: 0 }, yaxis: { title: { text: "input (GB/s)" }, rangemode: "tozero", nticks: 6 } },
    note: jobs.length ? "Input of all calls, between two writings of a job's statistics." : "Rates need two writings: tricomm dashboard --serve collects them.",
  };
}

function waits({ group, ranks, owners, seconds }, width) {
  const names = ranks.map(String), fits = (width - 120) / ranks.length >= 34;
  const text = seconds.map((row, i) => row.map((value, j) => `${plain(owners[i])}<br>waited ${value} s for ${plain(owners[j])}`));
  const trace = {
    type: "heatmap", x: names, y: names, z: seconds, text, hovertemplate: "%{text}<extra></extra>", texttemplate: fits ? "%{z:.3~g}" : undefined,
    colorscale: [[0, "#f7f7f7"], [1, "#d55e00"]], zmin: 0, xgap: 1, ygap: 1, showscale: false,
  };
  const axis = (text) => ({ type: "category", title: { text } });
  return {
    traces: [trace], layout: { xaxis: axis("waited for rank"), yaxis: { ...axis("waiting rank"), autorange: "reversed" } },
    note: `Seconds so far in calls that a peer had not entered, group ${group}.`,
  };
}
