// What is left of a batch at each level of the private step: a slider over the rows of a table, with strips of the picture beside it.
// Finds every `.qbi-bits` of a page. Strips, from the top: the photos; the first level; then two for each further level.
// Without JavaScript the whole picture and the table are there.
"use strict";

(() => {
  const make = (tag, settings = {}, children = []) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(settings)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };

  const strip = (name) => {
    const shown = make("div", { class: "qbi-strip", "data-strip": name, role: "img" });
    const text = make("p", { class: "qbi-caption" });
    return { whole: make("div", {}, [text, shown]), shown, text };
  };

  const mount = (place) => {
    const table = place.querySelector("table");
    const image = place.querySelector("img");
    if (!table || !image) return;
    const heads = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    const levels = [...table.querySelectorAll("tbody tr")].map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
    const strips = 2 * levels.length;
    const truth = strip("truth"), crafted = strip("crafted"), linear = strip("linear");
    const level = make("output", { "data-shown": "level", "aria-live": "polite" });
    const last = levels.length - 1;
    const input = make("input", { type: "range", min: 0, max: last, step: 1, "data-slider": "level", "aria-label": heads[0] });
    input.value = 0;

    const show = (part, row, words) => {
      part.text.textContent = words;
      part.shown.setAttribute("aria-label", words);
      part.shown.dataset.row = row;
      part.shown.style.backgroundImage = `url("${image.currentSrc || image.src}")`;
      part.shown.style.backgroundSize = `100% ${100 * strips}%`;
      part.shown.style.backgroundPosition = `0 ${(100 * row) / (strips - 1)}%`;
    };

    const draw = () => {
      const chosen = Number(input.value), cells = levels[chosen];
      level.textContent = `${cells[0]} (${heads[1]}: ${cells[1]})`;
      input.setAttribute("aria-valuetext", cells[0]);
      show(truth, 0, "The photos");
      show(crafted, chosen === 0 ? 1 : 2 * chosen, `${heads[2]}: ${cells[2]}`);
      linear.whole.hidden = chosen === 0;
      if (chosen > 0) show(linear, 2 * chosen + 1, `${heads[3]}: ${cells[3]}`);
    };

    input.addEventListener("input", draw);
    const row = make("label", { class: "qbi-slider" }, [make("span", {}, [heads[0]]), input, level]);
    const kept = make("details", {}, [make("summary", {}, ["All levels, as a picture and a table"])]);
    const picture = make("div", { class: "qbi-picture" }, [row, truth.whole, crafted.whole, linear.whole]);
    kept.append(...place.childNodes);
    place.append(picture, kept);
    draw();
  };

  const start = () => document.querySelectorAll(".qbi-bits").forEach(mount);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
