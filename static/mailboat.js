// What HTML can't do for the dashboard, in one small file: polling that behaves, swaps that keep focus and scroll, copying, the reader's own
// clock, and the favicon. Every page reads and every form works without it. It must never evaluate strings or write inline styles (CSP).
(() => {
  "use strict";

  // --- Swapping only what changed ------------------------------------------------------------------------------------------------------
  // htmx swaps whole elements, which loses focus, selection, open <details> and inner scroll. This walks both trees instead.
  const KEPT = new Set(["open", "data-kept"]);

  const same = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && (a.id ?? "") === (b.id ?? "");

  function morphAttributes(from, to) {
    for (const { name, value } of [...to.attributes]) {
      if (from.getAttribute(name) !== value && !KEPT.has(name)) from.setAttribute(name, value);
    }
    for (const { name } of [...from.attributes]) {
      if (!to.hasAttribute(name) && !KEPT.has(name)) from.removeAttribute(name);
    }
  }

  function morph(from, to) {
    if (from.nodeType !== Node.ELEMENT_NODE) {
      if (from.data !== to.data) from.data = to.data;
      return;
    }
    if (from.nodeName === "TIME" && from.dateTime === to.dateTime) return; // our own clock writes its text
    if (from === document.activeElement && from.matches("input, select, textarea")) return; // never under the reader's hands
    morphAttributes(from, to);
    let here = from.firstChild;
    for (const wanted of [...to.childNodes]) {
      let match = here;
      if (wanted.id) {
        while (match && match.id !== wanted.id) match = match.nextSibling;
      } else if (match && !same(match, wanted)) {
        match = null;
      }
      if (match && same(match, wanted)) {
        if (match === here) here = here.nextSibling;
        else from.insertBefore(match, here);
        morph(match, wanted);
      } else {
        from.insertBefore(wanted, here);
        if (wanted.nodeType === Node.ELEMENT_NODE) window.htmx.process(wanted);
      }
    }
    while (here) {
      const next = here.nextSibling;
      here.remove();
      here = next;
    }
  }

  window.htmx.defineExtension("morph", {
    isInlineSwap: (style) => style === "morph",
    handleSwap(style, target, fragment) {
      if (style !== "morph") return false;
      const fresh = fragment.firstElementChild;
      if (!fresh) return false;
      if (same(target, fresh)) {
        morph(target, fresh);
        return [target];
      }
      target.replaceWith(fresh);
      return [fresh];
    },
  });

  // --- Polling: only while visible, one request at a time, slower while the server is silent, and silent about success ----------------------
  const state = new WeakMap(); // element -> {due, busy, failures}
  let lastAnswer = Date.now();
  let failures = 0;

  function poll(now) {
    for (const element of document.querySelectorAll("[data-live]")) {
      const s = state.get(element) ?? { due: now + Number(element.dataset.live) * 1000, busy: false };
      state.set(element, s);
      if (s.busy || now < s.due) continue;
      s.busy = true;
      window.htmx.trigger(element, "poll");
    }
  }

  document.addEventListener("htmx:afterRequest", ({ detail }) => {
    const element = detail.elt;
    if (!element.matches("[data-live], #live")) return;
    const period = Number(element.dataset.live || 3) * 1000;
    if (detail.successful) {
      failures = 0;
      lastAnswer = Date.now();
    } else {
      failures += 1;
    }
    state.set(element, { due: Date.now() + Math.min(period * 2 ** Math.min(failures, 3), 20000), busy: false });
    showLiveness();
  });

  function showLiveness() {
    const live = document.querySelector("[data-live]") !== null;
    const note = document.getElementById("live-note");
    if (note) note.hidden = !live;
    const stale = document.getElementById("stale");
    if (!stale) return;
    const old = live && failures > 1;
    if (old) stale.querySelector("time").dateTime = new Date(lastAnswer).toISOString();
    if (stale.hidden === old) stale.hidden = !old;
    if (old) tellTime(stale);
  }

  // --- Time in the reader's zone, counted by the reader's clock (corrected by the server's) ------------------------------------------------
  const served = Date.parse(document.documentElement.dataset.now ?? "");
  const skew = Number.isNaN(served) ? 0 : served - Date.now();
  const absolute = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

  function words(seconds) {
    const s = Math.max(0, Math.floor(seconds));
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min`;
    if (s < 86400) return `${Math.floor(s / 3600)} h`;
    return `${Math.floor(s / 86400)} d`;
  }

  function tellTime(root = document) {
    const now = Date.now() + skew;
    for (const element of root.querySelectorAll("time[data-kind]")) {
      const at = Date.parse(element.dateTime);
      if (Number.isNaN(at)) continue;
      const text = {
        ago: () => `${words((now - at) / 1000)} ago`,
        since: () => words((now - at) / 1000),
        absolute: () => absolute.format(at),
      }[element.dataset.kind]();
      if (element.textContent !== text) element.textContent = text;
      if (element.dataset.kind !== "absolute") element.title = absolute.format(at);
    }
  }

  // --- Copying -------------------------------------------------------------------------------------------------------------------------
  async function copy(text) {
    if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
    const area = document.createElement("textarea"); // plain http on a private network has no clipboard object
    area.value = text;
    area.className = "sr";
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    return undefined;
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    await copy(button.dataset.copy);
    button.classList.add("done");
    document.getElementById("announce").textContent = "Copied";
    const label = button.querySelector("[data-copied]");
    const before = label?.textContent;
    if (label) label.textContent = label.dataset.copied;
    window.setTimeout(() => {
      button.classList.remove("done");
      document.getElementById("announce").textContent = "";
      if (label) label.textContent = before;
    }, 1600);
  });

  // Menus close when the reader goes elsewhere, and on Escape with the focus back on their button.
  document.addEventListener("click", (event) => {
    for (const menu of document.querySelectorAll("details.switch[open], details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const menu of document.querySelectorAll("details.switch[open], details.menu[open]")) {
      menu.open = false;
      menu.querySelector("summary").focus();
    }
  });

  document.addEventListener("change", (event) => {
    if (event.target.closest("form[data-submit-on-change]")) event.target.form.requestSubmit();
  });

  // --- Favicon: the number of lost islands ------------------------------------------------------------------------------------------------
  function favicon() {
    const lost = document.querySelector("[data-lost]")?.dataset.lost;
    const link = document.getElementById("favicon");
    if (lost === undefined || !link) return;
    const wanted = link.getAttribute("href").replace(/lost=\d+/, `lost=${lost}`);
    if (link.getAttribute("href") !== wanted) link.setAttribute("href", wanted);
  }

  document.addEventListener("htmx:afterSettle", () => {
    tellTime();
    favicon();
    showLiveness();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    for (const element of document.querySelectorAll("[data-live]")) {
      const s = state.get(element);
      if (s) s.due = 0;
    }
    tick();
  });

  function tick() {
    if (document.hidden) return;
    tellTime();
    showLiveness();
    poll(Date.now());
  }

  const settle = document.querySelector("[data-address]"); // a page answered by POST takes an address that can be reloaded
  if (settle) window.history.replaceState(null, "", settle.dataset.address);
  tick();
  window.setInterval(tick, 1000);
})();
