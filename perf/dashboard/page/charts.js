"use strict";
// One function per chart: a scene of the history in, traces and layout for Plotly out. Nothing here touches the page.

// Okabe and Ito's colours, which people who see few colours tell apart; symbols differ, too.
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon"];

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

function style(number) {
  return { colour: COLOURS[number % COLOURS.length], symbol: SYMBOLS[number % SYMBOLS.length] };
}

function sizeAxis(scene) {
  const sizes = [...new Set(scene.lines.flatMap((line) => line.size))].filter((size) => size > 0).sort((a, b) => a - b);
  const step = Math.ceil(sizes.length / 8);
  const shown = sizes.filter((_, i) => i % step === 0);
  return { type: "log", tickvals: shown, ticktext: shown.map(bytes), sizes };
}

function curve(line, number, y, extra) {
  const { colour, symbol } = style(number);
  return {
    type: "scatter", mode: "lines+markers", name: plain(line.kernel), x: line.size, y, legendgroup: String(number),
    line: { color: colour }, marker: { color: colour, symbol, size: 7 },
    customdata: line.size.map(bytes), hovertemplate: "%{customdata}: %{y:.4g}", ...extra,
  };
}

function latency(scene, lines) {
  const traces = [];
  for (const [number, line] of lines) {
    traces.push(curve(line, number, line.p50));
    traces.push({
      type: "scatter", mode: "lines", x: line.size, y: line.p99, fill: "tonexty", line: { width: 0 },
      fillcolor: style(number).colour + "33", hoverinfo: "skip", showlegend: false, legendgroup: String(number),
      name: plain(line.kernel) + " p99",
    });
  }
  return { traces, layout: { xaxis: sizeAxis(scene), yaxis: { type: "log", tickformat: "~g", title: { text: "time (us)" } } } };
}

function bandwidth(scene, lines) {
  const traces = lines.map(([number, line]) =>
    curve(line, number, line.size.map((size, i) => (line.p50[i] > 0 ? (size / line.p50[i] / 1e3) * scene.bus : null))));
  const axis = sizeAxis(scene);
  if (scene.link_gbs !== null && axis.sizes.length) {
    traces.push({
      type: "scatter", mode: "lines", name: "what links carry", hovertemplate: "%{y:.4g}",
      x: [axis.sizes[0], axis.sizes.at(-1)], y: [scene.link_gbs, scene.link_gbs], line: { dash: "dash", color: "#888888" },
    });
  }
  return {
    traces, layout: { xaxis: axis, yaxis: { type: "log", tickformat: "~g", title: { text: "bus bandwidth (GB/s)" } } },
    note: scene.link_gbs === null ? "This device's links are not known, so there is no limit to draw."
      : `The dashed line is ${scene.link_gbs} GB/s, what NCCL takes these GPUs' links to carry.`,
  };
}

function at(line, size) {
  const i = line.size.indexOf(size);
  return i < 0 ? null : line.p50[i];
}

// Another library's times where there are any, else those of the kernel that selection picks.
function baseline(scene) {
  const other = ["nccl", "symm_mem", "gloo"].map((name) => scene.lines.find((line) => line.library === name)).find(Boolean);
  if (other) return { name: other.kernel, of: (size) => at(other, size) };
  const picked = (size) => scene.lines.find((line) => line.kernel === scene.picks[size]);
  return { name: "the kernel that selection picks", of: (size) => (picked(size) ? at(picked(size), size) : null) };
}

function speedup(scene, lines) {
  const axis = sizeAxis(scene), base = baseline(scene);
  const ratios = lines.map(([, line]) => axis.sizes.map((size) => {
    const mine = at(line, size), theirs = base.of(size);
    return mine && theirs ? theirs / mine : null;
  }));
  const log = ratios.map((row) => row.map((ratio) => (ratio === null ? null : Math.log2(ratio))));
  const most = Math.max(0.25, ...log.flat().filter((v) => v !== null).map(Math.abs));
  const few = axis.sizes.length <= 10;
  const trace = {
    type: "heatmap", x: axis.sizes.map(bytes), y: lines.map(([, line]) => plain(line.kernel)), z: log, zmin: -most, zmax: most,
    colorscale: [[0, "#d55e00"], [0.5, "#f7f7f7"], [1, "#0072b2"]], xgap: 1, ygap: 1, text: ratios.map((row) => row.map((r) => (r === null ? "" : r.toFixed(2)))),
    texttemplate: few ? "%{text}" : undefined, hovertemplate: "%{y}, %{x}: %{text} times as fast<extra></extra>",
    colorbar: { title: { text: "times" }, tickvals: [-most, 0, most], ticktext: [-most, 0, most].map((v) => (2 ** v).toFixed(2)), thickness: 12 },
  };
  return {
    traces: [trace], layout: { xaxis: { type: "category" }, yaxis: { type: "category", automargin: true, autorange: "reversed" } },
    note: `The baseline's median over a line's, 2 being twice as fast. The baseline is ${base.name}.`,
  };
}

// The lines between which selection chooses here: NCCL is one where it picks NCCL for some size.
function candidates(scene) {
  const nccl = Object.values(scene.picks).includes("nccl");
  return scene.lines.filter((line) => line.library === "tricomm" || (nccl && line.library === "nccl"));
}

function fastest(scene, size) {
  const ours = candidates(scene).filter((line) => at(line, size) !== null);
  return ours.sort((a, b) => at(a, size) - at(b, size))[0];
}

function picks(scene) {
  const axis = sizeAxis(scene), rows = new Map(), apart = { x: [], text: [] };
  const put = (kernel, size, row) => {
    if (!rows.has(kernel)) rows.set(kernel, { x: [], y: [] });
    rows.get(kernel).x.push(size);
    rows.get(kernel).y.push(row);
  };
  let known = 0;
  for (const size of axis.sizes) {
    const best = fastest(scene, size), picked = scene.picks[size];
    if (best) put(best.kernel, size, "fastest");
    if (!picked) continue;
    known += 1;
    put(picked, size, "picked");
    const line = candidates(scene).find((l) => l.kernel === picked);
    const cost = line && at(line, size) !== null ? at(line, size) / at(best, size) - 1 : null;
    if (best && best.kernel !== picked) {
      apart.x.push(size);
      apart.text.push(cost === null ? "?" : `+${Math.round(cost * 100)} %`);
    }
  }
  const measured = scene.lines.map((line) => line.kernel);
  const names = [...measured, ...[...rows.keys()].filter((kernel) => !measured.includes(kernel))];
  const traces = [...rows].map(([kernel, { x, y }]) => {
    const { colour, symbol } = style(names.indexOf(kernel));
    return {
      type: "scatter", mode: "markers", name: plain(kernel), x, y, marker: { color: colour, symbol, size: 14 },
      customdata: x.map(bytes), hovertemplate: "%{customdata}",
    };
  });
  if (apart.x.length) {
    traces.push({
      type: "scatter", mode: "text", name: "picked is slower by", x: apart.x, y: apart.x.map(() => "differs"), text: apart.text,
      textfont: { size: 11 }, hovertemplate: "%{text}", showlegend: false,
    });
  }
  return {
    traces, layout: { xaxis: axis, yaxis: { type: "category", categoryarray: ["fastest", "picked", "differs"], categoryorder: "array", range: [-0.5, 2.5], automargin: true } },
    note: known ? `Selection picks another kernel than the fastest measured at ${apart.x.length} of ${known} sizes; how much slower that is stands above them (?: the picked one was not measured). tricomm tune moves the picks between kernels.`
      : "What selection picks on this box is not known: the history has no facts of it. tricomm bench writes them.",
  };
}

function past(scene, line, index, runs) {
  const { colour } = style(scene.lines.indexOf(line));
  const x = line.run[index].map((run) => runs[run][0]), y = line.past[index];
  const label = line.run[index].map((run) => plain(runs[run][1] || "no commit"));
  const traces = [{
    type: "scatter", mode: "lines+markers", name: plain(line.kernel), x, y, customdata: label, line: { color: colour },
    marker: { color: colour, size: 6 }, hovertemplate: "%{x}, %{customdata}: %{y:.4g} us<extra></extra>",
  }];
  for (const [name, colour, symbol, wanted] of [["slower", "#d55e00", "triangle-up", (b, a) => a > b], ["faster", "#009e73", "triangle-down", (b, a) => a <= b]]) {
    const found = line.changes[index].filter(([, before, after]) => wanted(before, after));
    if (!found.length) continue;
    traces.push({
      type: "scatter", mode: "markers", name, x: found.map(([i]) => x[i]), y: found.map(([i]) => y[i]),
      marker: { color: colour, symbol, size: 15, line: { width: 1, color: "#000000" } },
      text: found.map(([i, before, after]) => `${before.toPrecision(4)} to ${after.toPrecision(4)} us, ${label[i]}`), hovertemplate: "%{text}<extra></extra>",
    });
  }
  return { traces, layout: { xaxis: { type: "date" }, yaxis: { title: { text: "time (us)" }, rangemode: "tozero" } } };
}

function skew(scene, lines) {
  const traces = lines.map(([number, line]) => curve(line, number, line.skew));
  return { traces, layout: { xaxis: sizeAxis(scene), yaxis: { title: { text: "skew (us)" }, rangemode: "tozero" } } };
}

function bound(scene, lines) {
  const known = lines.filter(([, line]) => line.moved !== null);
  const trace = {
    type: "bar", orientation: "h", x: known.map(([, line]) => line.moved), y: known.map(([, line]) => plain(line.kernel)),
    text: known.map(([, line]) => line.moved.toFixed(2)), textposition: "auto", hovertemplate: "%{y}: %{x:.3f} times the bound<extra></extra>",
    marker: { color: known.map(([number]) => style(number).colour) },
  };
  const mark = { type: "line", x0: 1, x1: 1, yref: "paper", y0: 0, y1: 1, line: { dash: "dash", color: "#888888" } };
  return {
    traces: [trace], layout: { shapes: [mark], xaxis: { title: { text: "bytes over the bound" }, rangemode: "tozero" }, yaxis: { type: "category", automargin: true, autorange: "reversed" }, showlegend: false },
    note: known.length ? "Bytes to and from peers over the least that any algorithm needs; 1 is that bound." : "None of these lines is a kernel of tricomm's, whose bytes are counted.",
  };
}
