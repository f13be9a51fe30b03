// Charts as SVG. Each is hidden from screen readers; its caller shows the same values as a table.

import { svg } from "./dom.js";

const WIDTH = 640;
const HEIGHT = 260;
const LEFT = 44;
const RIGHT = 16;
const TOP = 26;
const BOTTOM = 34;
const MARK_BARS = 3;

/** A few round steps that cover `[0, most]`. */
export function ticksUpTo(most) {
  const raw = most / 4;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * size).find((candidate) => candidate >= raw * 0.999);
  const count = Math.ceil(most / step - 1e-9);
  return Array.from({ length: count + 1 }, (_, index) => Number((index * step).toPrecision(6)));
}

/**
 * Bars over whole numbers from 1 on.
 *
 * @param values one number for each bar
 * @param marks `{index, text, kind}` of bars to mark: `peak` or `cliff`
 * @param baseline draws a line at this value
 * @param line values of a line over the bars, one for each
 */
export function barChart(values, marks = [], baseline = null, line = []) {
  const ticks = ticksUpTo(Math.max(...values, ...line, baseline ?? 0) * 1.08);
  const top = ticks.at(-1);
  const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
  const slot = (WIDTH - LEFT - RIGHT) / values.length;
  const middle = (index) => LEFT + slot * (index + 0.5);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", "aria-hidden": "true" });
  for (const tick of ticks) {
    drawing.append(
      svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, String(tick)),
    );
  }
  values.forEach((value, index) => {
    const kind = marks.find((mark) => mark.index === index)?.kind ?? "";
    const slower = baseline !== null && value < baseline ? " slower" : "";
    const [from, to] = [y(value), y(0)];
    drawing.append(
      svg("rect", {
        class: `bar ${kind}${slower}`,
        x: middle(index) - slot * 0.34,
        width: slot * 0.68,
        y: from,
        height: to - from,
        rx: 3,
      }),
      svg(
        "text",
        { class: "tick", x: middle(index), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" },
        String(index + 1),
      ),
    );
  });
  if (baseline !== null) {
    drawing.append(svg("line", { class: "baseline", x1: LEFT, x2: WIDTH - RIGHT, y1: y(baseline), y2: y(baseline) }));
  }
  if (line.length) drawing.append(lineThrough(line.map((value, index) => [middle(index), y(value)])));
  for (const { index, text, kind } of marks) {
    const anchor = index < 2 ? "start" : index > values.length - 3 ? "end" : "middle";
    const x = anchor === "middle" ? middle(index) : middle(index) + (anchor === "start" ? -slot / 3 : slot / 3);
    // The text is wider than its bar.
    const below = [values, line].flatMap((each) => each.slice(Math.max(0, index - MARK_BARS), index + MARK_BARS));
    drawing.append(
      svg(
        "text",
        { class: `mark ${kind}`, x, y: y(Math.max(...below, baseline ?? 0)) - 8, "text-anchor": anchor },
        text,
      ),
    );
  }
  return drawing;
}

function lineThrough(points) {
  const dots = points.map(([x, y]) => svg("circle", { cx: x, cy: y, r: 4 }));
  const path = points.map((point) => point.map((value) => value.toFixed(1)).join()).join(" ");
  return svg("g", { class: "measured" }, svg("polyline", { points: path }), ...dots);
}

/** Bars along a track: `{start, length, class}` as shares of its width. Bars that overlap are drawn over each other. */
export function track(bars, marker = null) {
  const drawing = svg("svg", {
    viewBox: "0 0 1000 20",
    preserveAspectRatio: "none",
    class: "track",
    "aria-hidden": "true",
  });
  for (const bar of bars) {
    const width = Math.max(bar.length * 1000, 2);
    const x = Math.max(0, Math.min(bar.start * 1000, 1000 - width));
    drawing.append(
      svg("rect", {
        class: bar.class,
        x: x.toFixed(1),
        width: width.toFixed(1),
        y: bar.thin ? 8 : 3,
        height: bar.thin ? 4 : 14,
      }),
    );
  }
  if (marker !== null) {
    const x = (marker * 1000).toFixed(1);
    drawing.append(svg("line", { class: "marker", x1: x, x2: x, y1: 0, y2: 20 }));
  }
  return drawing;
}

/** A line of the last values, newest on the right, from 0 up to the largest. */
export function sparkline(values, size) {
  const drawing = svg("svg", {
    viewBox: "0 0 100 24",
    preserveAspectRatio: "none",
    class: "sparkline",
    "aria-hidden": "true",
  });
  const most = Math.max(...values, 1e-9);
  const first = size - values.length;
  const points = values.map(
    (value, index) => `${(((first + index) / (size - 1)) * 100).toFixed(1)},${(22 - (value / most) * 20).toFixed(1)}`,
  );
  if (points.length > 1) drawing.append(svg("polyline", { points: points.join(" ") }));
  return drawing;
}
