"use strict";
for (const table of document.querySelectorAll("table")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => sort(table, headings, column));
  });
}

function sort(table, headings, column) {
  const ascending = headings[column].getAttribute("aria-sort") !== "ascending";
  headings.forEach((heading) => heading.removeAttribute("aria-sort"));
  headings[column].setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => compare(value(a.cells[column]), value(b.cells[column]), ascending ? 1 : -1));
  table.tBodies[0].append(...rows);
}

// A cell says its value where that is not what it shows; a dash stands for none.
function value(cell) {
  if (cell.dataset.value !== undefined) return cell.dataset.value;
  const text = cell.textContent.trim();
  return text === "–" ? undefined : text;
}

// Empty cells stay at the end, whichever way the rest is sorted.
function compare(a, b, sign) {
  if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
  const [x, y] = [Number(a), Number(b)];
  if (!Number.isNaN(x) && !Number.isNaN(y)) return sign * (x - y);
  return sign * a.localeCompare(b, "en", { numeric: true });
}
