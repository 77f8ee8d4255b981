// Colours that people with any colour vision tell apart: viridis for amounts, Okabe and Ito's for names.

const VIRIDIS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];
const NAMES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c8c8c"];
// A phase has the same colour in every chart.
const COLOUR_OF = {
  wait: 6, capture: 4, plan: 3, stage: 1, write: 0, finish: 2, commit: 7, replicate: 3, flush: 5, transfer: 5,
  catalog: 4, agree: 7, destination: 1, read: 0, apply: 2, copy: 1, exchange: 3, retry: 5,
};

function colourOf(name) {
  if (name in COLOUR_OF) return NAMES[COLOUR_OF[name]];
  let hash = 0;
  for (const character of name) hash = (hash * 31 + character.charCodeAt(0)) % 997;
  return NAMES[hash % NAMES.length];
}

const LIGHT_TEXT = new Set(["#0072b2", "#d55e00", "#009e73"]);
const textOn = (colour) => (LIGHT_TEXT.has(colour) ? "#ffffff" : "#10141a");

const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 560px)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// What all charts have in common.
function chartBase() {
  const text = colour("text");
  return {
    animation: false,
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: text },
    tooltip: {
      confine: true,
      backgroundColor: colour("card"),
      borderColor: colour("line"),
      textStyle: { color: text, fontSize: 13 },
      extraCssText: "box-shadow: 0 2px 10px rgb(0 0 0 / 0.25);",
    },
  };
}

function axisStyle() {
  return {
    axisLine: { lineStyle: { color: colour("line") } },
    axisTick: { lineStyle: { color: colour("line") } },
    axisLabel: { color: colour("quiet"), fontSize: 12 },
    nameTextStyle: { color: colour("quiet"), fontSize: 12 },
    splitLine: { lineStyle: { color: colour("line") } },
  };
}

// The chart of an element; its size follows the element's.
function chartOf(node, resized = () => {}) {
  const known = echarts.getInstanceByDom(node);
  if (known) return known;
  const chart = echarts.init(node, null, { renderer: "canvas" });
  new ResizeObserver(() => {
    if (chart.getWidth() === node.clientWidth && chart.getHeight() === node.clientHeight) return;
    chart.resize();
    resized();
  }).observe(node);
  return chart;
}
