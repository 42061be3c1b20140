"use strict";
// The answers above the charts, as data: headlines of a scene, the sizes at which selection loses, changes by run.

const LOSS = 0.05; // of time, from which a pick is worth tuning

// The lines between which selection chooses here: NCCL is one where it picks NCCL for some size.
function candidates(scene) {
  const nccl = Object.values(scene.picks).includes("nccl");
  return scene.lines.filter((line) => line.library === "tricomm" || (nccl && line.library === "nccl"));
}

// By size: the kernel that selection picks, the fastest measured, and how much longer the pick takes; null: not known.
function picks(scene) {
  return sizesOf(scene.lines).map((size) => {
    const lines = candidates(scene).filter((line) => at(line, size) !== null).sort((a, b) => at(a, size) - at(b, size));
    const picked = scene.picks[size] ?? null, line = lines.find((l) => l.kernel === picked);
    return { size, picked, fastest: lines[0]?.kernel ?? null, loss: line && at(lines[0], size) ? at(line, size) / at(lines[0], size) - 1 : null };
  });
}

function percent(part) {
  return `${part > 0 ? "+" : ""}${(part * 100).toFixed(Math.abs(part) < 0.1 ? 1 : 0)} %`;
}

function counted(changes) {
  const slower = changes.filter((change) => change.step > 1).length;
  return `${slower} slower, ${changes.length - slower} faster`;
}

function headlines(scene, changed, late, since) {
  return [peak(scene), gain(scene), { title: `Since ${since}`, value: changed, note: late }, lost(scene)];
}

function peak(scene) {
  const ours = scene.lines.filter((line) => line.library === "tricomm");
  const points = ours.flatMap((line) => line.size.map((size, i) => ({ line, size, rate: busbw(scene, size, line.p50[i]) })));
  const best = points.filter(({ rate }) => rate !== null).sort((a, b) => b.rate - a.rate)[0];
  if (!best) return { title: "Peak bus bandwidth", value: "not known", note: "no kernel of tricomm has been measured here" };
  const model = predicted(scene, best.size), should = model === null ? "" : `; predicted: ${short(busbw(scene, best.size, model))} GB/s`;
  const share = scene.link_gbs === null ? "share of the links not known"
    : `${Math.round((best.rate / scene.link_gbs) * 100)} % of the links' ${scene.link_gbs} GB/s`;
  return { title: "Peak bus bandwidth", value: `${short(best.rate)} GB/s`, note: `${share}, by ${best.line.kernel} at ${bytes(best.size)}${should}` };
}

function gain(scene) {
  const base = baseline(scene);
  const missing = scene.simulated ? "NCCL needs GPUs" : "tricomm bench --against nccl measures it";
  if (!base.library) return { title: "Speed-up over NCCL", value: "not known", note: missing };
  const ratios = picks(scene).map(({ size, picked, fastest }) => {
    const line = scene.lines.find((l) => l.kernel === (picked ?? fastest));
    return line && at(line, size) && base.of(size) ? base.of(size) / at(line, size) : null;
  }).filter((ratio) => ratio !== null);
  const title = `Speed-up over ${base.name === "nccl" ? "NCCL" : base.name}`;
  if (!ratios.length) return { title, value: "not known", note: "no size has both times" };
  const known = Object.keys(scene.picks).length, wins = ratios.filter((ratio) => ratio > 1).length;
  return {
    title, value: `${Math.min(...ratios).toFixed(2)} to ${Math.max(...ratios).toFixed(2)} x`,
    note: `${known ? "with the kernels that selection picks" : "with the fastest kernels measured"}; faster at ${wins} of ${ratios.length} sizes`,
  };
}

function lost(scene) {
  const known = picks(scene).filter(({ loss }) => loss !== null), bad = known.filter(({ loss }) => loss > LOSS).sort((a, b) => b.loss - a.loss);
  const title = "Selection loses over 5 %";
  if (!known.length) return { title, value: "not known", note: "the history has no facts of this box, or the picked kernels were not measured" };
  const note = bad.length ? `most at ${bytes(bad[0].size)} (${percent(bad[0].loss)}); tricomm tune moves the picks` : "";
  return { title, value: `at ${bad.length} of ${known.length} sizes`, note };
}

// Steps of all scenes like this one in runs `first` to `last`: with `kind` changes those that the rank test has found.
function steps(data, scene, kind, first, last) {
  const found = [];
  for (const other of data.scenes.filter((s) => s.simulated === scene.simulated)) {
    other.lines.forEach((line, number) => line[kind].forEach((list, i) => list.forEach(([at, before, after]) => {
      const run = line.run[i][at], old = data.runs[line.run[i][Math.max(at - 1, 0)]][1];
      if (run >= first && run <= last) found.push({ scene: other, line, number, size: line.size[i], run, old, before, after, step: after / before });
    })));
  }
  const far = (change) => Math.abs(Math.log(change.step));
  return found.sort((a, b) => b.run - a.run || (far(a) === far(b) ? 0 : far(b) - far(a)));
}

function grouped(items, key) {
  const groups = new Map();
  for (const item of items) {
    if (!groups.has(key(item))) groups.set(key(item), []);
    groups.get(key(item)).push(item);
  }
  return [...groups.values()];
}

function ago(date, now) {
  const hours = (Date.parse(now) - Date.parse(date)) / 3.6e6;
  if (!(hours >= 1)) return hours >= 0 ? "in the last hour" : date;
  const [count, unit] = hours >= 24 ? [Math.floor(hours / 24), "day"] : [Math.floor(hours), "hour"];
  return `${count} ${unit}${count === 1 ? "" : "s"} ago`;
}
