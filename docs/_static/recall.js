// How much QBI reads: expected A, P and R for a batch of B and a layer of N neurons, with p = 1/B (equations 8, 9 and 12 of the paper).
// Finds every `.qbi-recall` of a page and puts sliders before its table, which stays for those who have no JavaScript.
"use strict";

(() => {
  const VALUES = {
    B: [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 50, 64, 80, 100, 128, 160, 200, 256, 320, 400, 512],
    N: [10, 20, 50, 100, 150, 200, 300, 400, 500, 600, 800, 1000, 1500, 2000, 3000, 4096],
  };
  const LARGEST = 512;
  const POINTS = 240;

  // Shares, by closed form; the same as qbi.theory.leakage.
  const expected = (neurons, batch) => {
    const p = 1 / batch;
    if (batch === 1) return { A: 1, P: 1, R: 1 };
    const alone = p * Math.exp((batch - 1) * Math.log1p(-p));
    return {
      A: -Math.expm1(batch * Math.log1p(-p)),
      P: batch * alone,
      R: -Math.expm1(neurons * Math.log1p(-alone)),
    };
  };

  const make = (tag, settings = {}, children = []) => {
    const element = tag.startsWith("svg:")
      ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
      : document.createElement(tag);
    for (const [name, value] of Object.entries(settings)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };

  const slider = (name, text, start, changed) => {
    const last = VALUES[name].length - 1;
    const input = make("input", { type: "range", min: 0, max: last, step: 1, "data-slider": name, "aria-label": text });
    input.value = VALUES[name].indexOf(start);
    const shown = make("output", { "data-shown": name });
    const number = () => VALUES[name][Number(input.value)];
    const say = () => {
      shown.textContent = number().toLocaleString("en");
      input.setAttribute("aria-valuetext", `${name} = ${number()}`);
    };
    input.addEventListener("input", () => (say(), changed()));
    say();
    return { row: make("label", { class: "qbi-slider" }, [make("span", {}, [text]), input, shown]), number };
  };

  const WIDE = 480, HIGH = 220, LEFT = 52, BOTTOM = 34;
  const x = (batch) => LEFT + ((WIDE - LEFT - 8) * Math.log(batch)) / Math.log(LARGEST);
  const y = (share) => 8 + (HIGH - BOTTOM - 8) * (1 - share);

  const axes = () => {
    const parts = [];
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      parts.push(make("svg:line", { x1: LEFT, x2: WIDE - 8, y1: y(share), y2: y(share), class: "qbi-grid" }));
      parts.push(make("svg:text", { x: LEFT - 6, y: y(share) + 4, "text-anchor": "end" }, [`${100 * share} %`]));
    }
    for (const batch of [1, 4, 16, 64, 256]) {
      parts.push(make("svg:text", { x: x(batch), y: HIGH - BOTTOM + 16, "text-anchor": "middle" }, [`${batch}`]));
    }
    parts.push(make("svg:text", { x: WIDE - 8, y: HIGH - 4, "text-anchor": "end" }, ["samples in the batch, B"]));
    return parts;
  };

  const mount = (place) => {
    const curve = make("svg:path", { class: "qbi-curve", fill: "none" });
    const mark = make("svg:circle", { r: 6, class: "qbi-mark" });
    const chart = make("svg:svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": "R over the batch size" });
    chart.append(...axes(), curve, mark);
    const bars = {};
    const rows = [
      ["A", "A: neurons that fire for some sample"],
      ["P", "P: neurons that fire for exactly one"],
      ["R", "R: samples of the batch that are read"],
    ].map(([name, text]) => {
      const bar = make("span", { class: "qbi-bar" });
      const shown = make("output", { "data-share": name });
      bars[name] = { bar, shown };
      return make("div", { class: "qbi-share" }, [make("span", {}, [text]), make("span", { class: "qbi-track" }, [bar]), shown]);
    });

    const draw = () => {
      const N = neurons.number(), B = batch.number();
      for (const [name, share] of Object.entries(expected(N, B))) {
        bars[name].bar.style.width = `${100 * share}%`;
        bars[name].shown.textContent = `${(100 * share).toFixed(1)} %`;
        bars[name].shown.dataset.value = share;
      }
      const points = [];
      for (let point = 0; point <= POINTS; point += 1) {
        const size = Math.pow(LARGEST, point / POINTS);
        points.push(`${x(size).toFixed(1)},${y(expected(N, size).R).toFixed(1)}`);
      }
      curve.setAttribute("d", `M${points.join("L")}`);
      mark.setAttribute("cx", x(B));
      mark.setAttribute("cy", y(expected(N, B).R));
    };

    const batch = slider("B", "Samples in the batch, B", 20, draw);
    const neurons = slider("N", "Neurons of the layer, N", 200, draw);
    const table = place.querySelector("table");
    const kept = make("details", {}, [make("summary", {}, ["The same as a table"])]);
    const picture = make("div", { class: "qbi-picture" }, [batch.row, neurons.row, chart, ...rows]);
    place.prepend(picture);
    if (table) {
      const whole = table.closest(".table-wrapper") || table;
      whole.replaceWith(kept);
      kept.append(whole);
    }
    draw();
  };

  const start = () => document.querySelectorAll(".qbi-recall").forEach(mount);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
