(function () {
  "use strict";
  var blocks = Array.from(document.querySelectorAll("section.block"));
  var tokens = Array.from(document.querySelectorAll("a.token"));
  var slider = document.getElementById("slider");
  var place = document.getElementById("place");
  var buttons = Array.from(document.querySelectorAll("button[data-step]"));
  var current = 1;
  if (blocks.length === 0) { return; }

  function asked() {
    var found = /^#block-(\d+)$/.exec(location.hash);
    return found ? Number(found[1]) : 1;
  }

  function show(number) {
    current = Math.max(1, Math.min(blocks.length, number));
    blocks.forEach(function (block, index) { block.hidden = index + 1 !== current; });
    tokens.forEach(function (token) {
      token.classList.toggle("current", token.hash === "#block-" + current);
    });
    slider.value = current;
    place.textContent = "Block " + current + " of " + blocks.length;
    buttons.forEach(function (button) {
      var to = current + Number(button.dataset.step);
      button.disabled = Math.max(1, Math.min(blocks.length, to)) === current;
    });
  }

  function go(number) {
    show(number);
    history.replaceState(null, "", "#block-" + current);
  }

  document.getElementById("stepper").hidden = false;
  document.body.classList.add("stepping");
  buttons.forEach(function (button) {
    button.addEventListener("click", function () { go(current + Number(button.dataset.step)); });
  });
  slider.addEventListener("input", function () { go(Number(slider.value)); });
  tokens.forEach(function (token) {
    token.addEventListener("click", function (event) {
      event.preventDefault();
      go(Number(token.hash.slice(7)));
    });
  });
  window.addEventListener("hashchange", function () { show(asked()); });
  document.addEventListener("keydown", function (event) {
    if ([event.altKey, event.ctrlKey, event.metaKey, event.shiftKey].some(Boolean)) { return; }
    if (event.target.closest("input, .scroll")) { return; }
    if (event.key === "ArrowLeft") { go(current - 1); } else if (event.key === "ArrowRight") { go(current + 1); }
  });
  window.addEventListener("beforeprint", function () {
    blocks.forEach(function (block) { block.hidden = false; });
  });
  window.addEventListener("afterprint", function () { show(current); });
  show(asked());
}());
