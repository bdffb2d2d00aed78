(() => {
  "use strict";
  const all = (selector) => [...document.querySelectorAll(selector)];
  document.body.classList.remove("unscripted");
  const canvas = document.querySelector(".canvas");
  const scene = document.getElementById("scene");
  const detail = document.getElementById("detail");
  const full = { width: scene.width.baseVal.value, height: scene.height.baseVal.value };
  let scale = 1;

  // Zoom about a point of the canvas, its middle by default.
  const zoom = (to, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) => {
    const next = Math.min(3, Math.max(0.05, to));
    const left = (canvas.scrollLeft + x) * next / scale - x;
    const top = (canvas.scrollTop + y) * next / scale - y;
    scale = next;
    scene.setAttribute("width", full.width * scale);
    scene.setAttribute("height", full.height * scale);
    canvas.scrollTo(left, top);
  };
  const fit = () => Math.min(1, (canvas.clientWidth - 16) / full.width, (canvas.clientHeight - 16) / full.height);
  all("[data-zoom]").forEach((button) => button.addEventListener("click", () =>
    zoom(button.dataset.zoom === "fit" ? fit() : scale * Number(button.dataset.zoom))));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    zoom(scale * Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
  }, { passive: false });

  // Drag with the mouse; fingers scroll by themselves.
  let drag = null;
  let moved = false;
  canvas.addEventListener("pointerdown", (event) => {
    moved = false;
    if (event.pointerType === "mouse" && event.button === 0) {
      drag = { x: event.clientX + canvas.scrollLeft, y: event.clientY + canvas.scrollTop, id: event.pointerId };
    }
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const left = drag.x - event.clientX, top = drag.y - event.clientY;
    if (!moved && Math.hypot(left - canvas.scrollLeft, top - canvas.scrollTop) < 4) return;
    if (!moved) canvas.setPointerCapture(drag.id);
    moved = true;
    canvas.classList.add("drag");
    canvas.scrollTo(left, top);
  });
  const drop = () => { drag = null; canvas.classList.remove("drag"); };
  canvas.addEventListener("pointerup", drop);
  canvas.addEventListener("pointercancel", drop);

  // Select a group everywhere: card, row, dots.
  const select = (index) => all("[data-group]").forEach((element) =>
    element.classList.toggle("selected", element.dataset.group === index));
  const show = (card) => {
    const title = card.querySelector("title").textContent;
    detail.replaceChildren(...title.split("\n").map((line) => {
      const p = document.createElement("p");
      p.textContent = line;
      return p;
    }));
    const index = card.dataset.group;
    if (index === undefined) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Show in the table";
    button.addEventListener("click", () => {
      const row = document.getElementById("row-" + index);
      row.scrollIntoView({ block: "center" });
      row.querySelector("button").focus({ preventScroll: true });
    });
    detail.append(button);
  };
  const reveal = (card) => {
    const box = canvas.getBoundingClientRect(), at = card.getBoundingClientRect();
    canvas.scrollBy(at.left + at.width / 2 - box.left - box.width / 2, at.top + at.height / 2 - box.top - box.height / 2);
  };
  const open = (card) => { select(card.dataset.group); show(card); };
  all(".card").forEach((card) => {
    card.addEventListener("click", () => { if (!moved) open(card); });
    card.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(card); }
    });
  });
  all("[data-show]").forEach((button) => button.addEventListener("click", () => {
    const card = document.getElementById("card-" + button.dataset.show);
    open(card);
    document.getElementById("graph").scrollIntoView();
    reveal(card);
  }));
  all(".roofline [data-group]").forEach((dot) => dot.addEventListener("click", () =>
    open(document.getElementById("card-" + dot.dataset.group))));

  // Refusals by reason.
  const reason = document.getElementById("reason");
  if (reason) reason.addEventListener("change", () => all(".reason").forEach((block) => {
    block.hidden = reason.value !== "" && block.dataset.reason !== reason.value;
    if (reason.value && !block.hidden) block.open = true;
  }));
  addEventListener("beforeprint", () => all("details").forEach((block) => { block.open = true; }));
  if (detail.dataset.first) open(document.getElementById("card-" + detail.dataset.first));
  const start = document.querySelector(".card");
  if (start) { reveal(start); canvas.scrollTop = 0; }
})();
