// The strip beside the chat: what was drafted for an answer, and for all of them.

const SHOWN_PASSES = 160;
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function drawn(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

let plainSpeed = 0; // tokens per second without drafts, once a race has shown it

/** An answer's figures in one line. */
function lineOf(answer) {
  if (!answer.numTokens || answer.seconds <= 0) return "";
  const { mean_acceptance_length: tau, drafted_tokens: drafted } = answer.figures;
  const speed = answer.tokensPerSecond;
  const parts = speed ? [`${answer.speed} tokens/s`] : [];
  if (speed && plainSpeed) parts[0] += `, ${(speed / plainSpeed).toFixed(2)} times plain decoding in the last race`;
  if (drafted) parts.push(`${tau.toFixed(2)} tokens per pass`);
  parts.push(`${answer.numTokens} tokens`, `the first after ${answer.firstAfter.toFixed(2)} s`);
  return parts.join(" · ");
}

/** Show an answer's figures, and those of all `answers`. */
function showStrip(answer, answers) {
  const one = answer ? answer.figures : new Tally().counts;
  const all = sumOf(answers.map((each) => each.figures));
  const speed = answer ? answer.speed : "–";
  byId("brief").textContent = answer
    ? `${speed} tok/s · tau ${one.mean_acceptance_length.toFixed(2)}` : "";
  const numAll = answers.reduce((n, each) => n + each.numTokens, 0);
  const rows = [
    ["Tokens", answer ? answer.numTokens : 0, numAll],
    ["Tokens per second", speed, ""],
    ["Mean acceptance length (tau)", one.mean_acceptance_length.toFixed(2), all.mean_acceptance_length.toFixed(2)],
    ["Drafted", one.drafted_tokens, all.drafted_tokens],
    ["Accepted", one.accepted_tokens, all.accepted_tokens],
    ["Target passes", one.target_passes, all.target_passes],
  ];
  if (all.copied_tokens) {
    rows.push(["Copied", one.copied_tokens ?? 0, all.copied_tokens]);
    rows.push(["Copied and accepted", one.accepted_copied_tokens ?? 0, all.accepted_copied_tokens]);
  }
  if (all.batched_tokens) rows.push(["In rounds shared with others", one.batched_tokens, all.batched_tokens]);
  byId("figures").replaceChildren(
    ...rows.map(([name, ...values]) => {
      const head = element("th", "", name);
      head.scope = "row";
      return element("tr", "", head, ...values.map((value) => element("td", "", String(value))));
    }),
  );
  showBars(one);
  showLengths(one.draft_lengths);
  showEvents(answer ? answer.events : []);
}

function sumOf(each) {
  const sum = (name) => each.reduce((n, counts) => n + (counts[name] ?? 0), 0);
  const all = Object.fromEntries(COUNTED.map((name) => [name, sum(name)]));
  all.mean_acceptance_length = all.target_passes ? all.emitted_tokens / all.target_passes : 1;
  return all;
}

function showBars(counts) {
  const rates = counts.acceptance_by_position;
  const parts = rates.flatMap((rate, i) => {
    const bar = element("div");
    bar.style.width = `${100 * rate}%`;
    return [element("span", "", String(i + 1)), element("div", "track", bar), element("span", "", `${Math.round(100 * rate)}%`)];
  });
  byId("bars").replaceChildren(...(parts.length ? parts : ["–"]));
  byId("bars-reported").textContent = rates.map((rate, i) => `Position ${i + 1}: ${Math.round(100 * rate)} percent.`).join(" ") || "Nothing was drafted.";
}

/** A line of steps, one per pass of the target; the latest passes where there are many. */
function showLengths(lengths) {
  const shown = lengths.slice(-SHOWN_PASSES);
  const most = Math.max(1, ...shown);
  byId("lengths-reported").textContent = lengths.length
    ? `Over ${lengths.length} passes of the target: lately ${shown.at(-1)}, at most ${most}.` : "Nothing was decoded yet.";
  if (!shown.length) {
    byId("lengths").replaceChildren("–");
    return;
  }
  const width = Math.max(shown.length, 20);
  const svg = drawn("svg", { viewBox: `0 0 ${width} 50`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const y = (length) => 48 - (46 * length) / most;
  const steps = shown.map((length, i) => `${i ? "L" : "M"}${i} ${y(length)}H${i + 1}`).join("");
  svg.append(drawn("path", { class: "axis", d: `M0 ${y(0)}H${width}`, "vector-effect": "non-scaling-stroke" }));
  svg.append(drawn("path", { class: "line", d: steps }));
  const first = lengths.length - shown.length + 1;
  const ends = element("div", "ends", element("span", "", `pass ${first}`), element("span", "", `0 to ${most} tokens`), element("span", "", `${lengths.length}`));
  byId("lengths").replaceChildren(svg, ends);
}

function showEvents(events) {
  byId("events").replaceChildren(
    ...events.slice(-30).map((event) => element("li", "", `Token ${event.num_tokens}: ${event.what}. ${asSentence(event.reason)}.`)),
  );
}
