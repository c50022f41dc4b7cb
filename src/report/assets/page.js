"use strict";
// Draws the curves of the page. The data are in the element `data`; every other part of the page stands as it is without this.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  document.getElementById("only-differences")?.addEventListener("change", (event) => {
    document.body.classList.toggle("only-differences", event.target.checked);
  });
  // Before the first step there is nothing to draw.
  if (data.charts.length === 0) return;

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const runColour = (run) => colour("--c" + (run % 8));
  const faint = (hex, alpha) => hex + Math.round(255 * alpha).toString(16).padStart(2, "0");
  const single = data.runs.length === 1;

  // The range of steps that all charts share.
  const full = data.range;
  let range = [...full];
  let smoothing = 0;
  let charts = [];
  let isReady = false;
  let isFollowing = false;

  // The exponential moving average of points, corrected for its beginning; gaps stay.
  function smoothed(points) {
    let mean = 0, weight = 0;
    return points.map((y) => {
      if (y === null) return null;
      mean = smoothing * mean + (1 - smoothing) * y;
      weight = smoothing * weight + (1 - smoothing);
      return mean / weight;
    });
  }

  function number(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2);
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(5));
  }

  // A number with little room.
  function short(value) {
    const size = Math.abs(value);
    if (size >= 1e9) return value.toExponential(1);
    if (size >= 1e6) return +(value / 1e6).toPrecision(4) + " M";
    return size >= 1e4 ? +(value / 1e3).toPrecision(4) + " k" : number(value);
  }

  function bytes(value) {
    if (value === null || value === undefined) return "–";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (value >= 1024 && unit < 4) { value /= 1024; unit += 1; }
    return +value.toPrecision(3) + " " + units[unit];
  }

  // The tables of a chart's curves, each with steps of its own, and their series: raw, then smoothed.
  function curvesOf(chart) {
    const tables = [], series = [];
    data.runs.forEach((run, index) => {
      for (const { id, name } of chart.curves) {
        const curve = run.curves[id];
        if (!curve) continue;
        const label = single ? name : run.label + (chart.curves.length > 1 ? ", " + name : "");
        const isSparse = Boolean(curve.sparse);
        const stroke = single && isSparse ? colour("--c1") : runColour(index);
        tables.push([curve.x, curve.y]);
        series.push({ label, stroke, isSparse, isSmooth: false });
        if (isSparse || smoothing === 0) continue;
        const [x, y] = curve.mean ? [curve.mean.x, curve.mean.y] : [curve.x, curve.y];
        tables.push([x, smoothed(y)]);
        series.push({ label: label + ", smoothed", stroke, isSparse, isSmooth: true });
      }
    });
    return { tables, series };
  }

  function marks(u) {
    const { ctx } = u;
    const { left, top, width, height } = u.bbox;
    const ratio = devicePixelRatio;
    const at = (step) => Math.round(u.valToPos(step, "x", true));
    const isIn = (x) => x >= left && x <= left + width;
    ctx.save();
    data.runs.forEach((run, index) => {
      ctx.fillStyle = faint(colour("--quiet"), 0.18);
      for (const [from, to] of run.marks.gaps) {
        const begin = Math.max(at(from), left), end = Math.min(at(to), left + width);
        if (end >= begin) ctx.fillRect(begin, top, Math.max(end - begin, ratio), height);
      }
      ctx.lineWidth = ratio;
      ctx.strokeStyle = single ? colour("--quiet") : runColour(index);
      ctx.setLineDash([4 * ratio, 4 * ratio]);
      for (const step of run.marks.restarts) {
        const x = at(step);
        if (!isIn(x)) continue;
        ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + height); ctx.stroke();
      }
      ctx.setLineDash([]);
      ctx.strokeStyle = colour("--skip");
      for (const step of run.marks.skipped) {
        const x = at(step);
        if (!isIn(x)) continue;
        ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + 9 * ratio); ctx.stroke();
      }
      ctx.fillStyle = single ? colour("--text") : runColour(index);
      for (const step of run.marks.checkpoints) {
        const x = at(step), y = top + height;
        if (!isIn(x)) continue;
        ctx.beginPath(); ctx.moveTo(x, y - 6 * ratio); ctx.lineTo(x - 4 * ratio, y); ctx.lineTo(x + 4 * ratio, y); ctx.fill();
      }
    });
    ctx.restore();
  }

  function setRange(min, max, by) {
    isFollowing = true;
    range = [min, max];
    for (const { u } of charts) if (u !== by) u.setScale("x", { min, max });
    document.getElementById("from").value = Math.round(min);
    document.getElementById("to").value = Math.round(max);
    // Scales are set at the end of this turn.
    setTimeout(() => { isFollowing = false; });
  }

  function options(element, onAxis, isLog) {
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
    const label = (u, values) => values.map((value) => (value === null ? "" : onAxis(value)));
    return {
      width: Math.max(element.clientWidth - 20, 120), height: 240,
      cursor: { sync: { key: "steps" }, bind: { dblclick: () => () => setRange(...full) } },
      scales: { x: { time: false, auto: false, min: range[0], max: range[1] }, y: isLog ? { distr: 3 } : {} },
      axes: [{ ...axis, values: (u, values) => values.map((value) => value.toLocaleString("en")) }, { ...axis, size: 72, values: label }],
      hooks: {
        draw: [marks],
        setScale: [(u, key) => {
          if (key === "x" && isReady && !isFollowing) setRange(u.scales.x.min, u.scales.x.max, u);
        }],
      },
    };
  }

  function drawCurves(chart) {
    const element = document.getElementById("chart-" + chart.id);
    const { tables, series } = curvesOf(chart);
    if (tables.length === 0) return;
    const formatted = chart.unit === "bytes" ? bytes : number;
    const isLog = document.getElementById("log-" + chart.id)?.checked;
    const lines = series.map(({ label, stroke, isSparse, isSmooth }) => ({
      label, value: (u, value) => formatted(value),
      stroke: smoothing > 0 && !isSmooth && !isSparse ? faint(stroke, 0.3) : stroke,
      width: isSmooth ? 2 : 1.25,
      dash: isSparse ? [5, 4] : undefined,
      points: isSparse ? { show: true, size: 6, fill: stroke } : undefined,
    }));
    const u = new uPlot({ ...options(element, chart.unit === "bytes" ? bytes : short, isLog), series: [{ label: "step" }, ...lines] }, positive(uPlot.join(tables), isLog), element);
    charts.push({ id: chart.id, u, element, chart });
  }

  // A logarithmic axis has no place for zero and below.
  function positive(table, isLog) {
    return isLog ? table.map((column, index) => (index ? Array.from(column, (y) => (y <= 0 ? null : y)) : column)) : table;
  }

  // The parts of a step's time, one on top of the other: each is drawn from zero to its sum with those below, the highest first.
  function drawTimes(run, index) {
    const element = document.getElementById("times-" + index);
    if (!element || !run.times) return;
    const sums = [];
    run.times.parts.forEach((part, at) => sums.push(part.map((ms, i) => ms + (at ? sums[at - 1][i] : 0))));
    const count = sums.length;
    const lines = data.parts.map((name, at) => ({
      label: name, stroke: colour("--part" + at), fill: colour("--part" + at), width: 1, points: { show: false },
      value: (u, value, series, i) => (i === null || i === undefined ? "–" : number(run.times.parts[at][i]) + " ms"),
    }));
    const u = new uPlot({ ...options(element, (ms) => short(ms) + " ms"), series: [{ label: "step" }, ...lines.reverse()] }, [run.times.x, ...Array.from({ length: count }, (_, at) => sums[count - 1 - at])], element);
    charts.push({ id: "times-" + index, u, element });
  }

  function draw() {
    isReady = false;
    charts.forEach(({ u }) => u.destroy());
    charts = [];
    data.charts.forEach(drawCurves);
    data.runs.forEach(drawTimes);
    window.report = { charts: Object.fromEntries(charts.map(({ id, u }) => [id, u])), setRange };
    setTimeout(() => { isReady = true; });
  }

  function fit() {
    for (const { u, element } of charts) {
      const width = Math.max(element.clientWidth - 20, 120);
      if (u.width !== width) u.setSize({ width, height: 240 });
    }
  }

  document.getElementById("smoothing").addEventListener("input", (event) => {
    smoothing = Number(event.target.value);
    document.getElementById("smoothing-value").textContent = smoothing.toFixed(2);
    draw();
  });
  for (const box of document.querySelectorAll("input[id^='log-']")) box.addEventListener("change", draw);
  const zoom = () => {
    const [from, to] = ["from", "to"].map((id) => Number(document.getElementById(id).value));
    if (from < to) setRange(from, to);
  };
  document.getElementById("from").addEventListener("change", zoom);
  document.getElementById("to").addEventListener("change", zoom);
  document.getElementById("whole").addEventListener("click", () => setRange(...full));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => { root.dataset.theme = "light"; draw(); });
  addEventListener("afterprint", () => { delete root.dataset.theme; draw(); });
  new ResizeObserver(fit).observe(document.body);
  draw();
  setRange(...full);
})();
