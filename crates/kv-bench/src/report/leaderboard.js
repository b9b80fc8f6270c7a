// The leaderboard under filters: the same rows as `leaderboard.rs` writes, of fewer answers.

/** Student's quantile of a 95 % interval, from a table by the inverse of the degrees of freedom. */
function quantile(quantiles, freedom) {
  const place = (quantiles.length - 1) / freedom;
  const low = Math.min(Math.floor(place), quantiles.length - 2);
  return quantiles[low] + (quantiles[low + 1] - quantiles[low]) * (place - low);
}

/**
 * The mean of groups' means and half its 95 % interval's width, as `Estimate::of_groups`: with the
 * degrees of freedom of Welch and Satterthwaite.
 */
function estimate(groups, quantiles) {
  const parts = groups.map((samples) => {
    const count = samples.length;
    const mean = samples.reduce((sum, sample) => sum + sample, 0) / count;
    const squares = samples.reduce((sum, sample) => sum + (sample - mean) ** 2, 0);
    return { mean, variance: squares / (count - 1) / count, freedom: count - 1 };
  });
  const sum = (number) => parts.reduce((sum, part) => sum + number(part), 0);
  const variance = sum((part) => part.variance);
  const freedom = variance ** 2 / sum((part) => part.variance ** 2 / part.freedom);
  const half = quantile(quantiles, freedom) * Math.sqrt(variance) / groups.length;
  return { mean: sum((part) => part.mean) / groups.length, half: half > 0 ? half : null };
}

/** Adds a score to a sample of a task. */
function addSample(tasks, task, sample, score) {
  if (!tasks.has(task)) tasks.set(task, new Map());
  const [total, count] = tasks.get(task).get(sample) ?? [0, 0];
  tasks.get(task).set(sample, [total + score, count + 1]);
}

/** Averages that differ by no more have one rank. */
const EQUAL = 1e-9;

/** The rows of the view: each setup's answers, summed up. */
function rows(data) {
  const shown = data.answers.filter(([setup, question, mode]) => {
    const [task, , length] = data.questions[question];
    return showsSetup(data.setups[setup]) && showsMode(data.modes[mode])
      && showsQuestion(data.tasks[task], length);
  });
  const fullSetup = data.setups.findIndex((setup) => setup.full);
  const fullBytes = new Map();
  const sums = new Map();
  for (const [index, question, mode, score, bytes, tokens, seconds] of shown) {
    // The full cache's answers come before all others.
    if (index === fullSetup) fullBytes.set(`${question} ${mode}`, bytes);
    const [task, name, length] = data.questions[question];
    if (!sums.has(index)) {
      sums.set(index, { tasks: new Map(), whole: new Map(),
        count: 0, bytes: 0, full: 0, tokens: 0, seconds: 0 });
    }
    const sum = sums.get(index);
    // A question's modes and samples are one sample.
    addSample(sum.tasks, task, `${length} ${name}`, score);
    addSample(sum.whole, data.whole_tasks[task], `${length} ${name}`, score);
    sum.count += 1;
    // A number that is not known is null, and makes its sum unknown.
    sum.bytes += bytes ?? NaN;
    sum.full += fullBytes.get(`${question} ${mode}`) ?? NaN;
    sum.tokens += tokens ?? NaN;
    sum.seconds += seconds ?? NaN;
  }
  const tasks = new Set(shown.map(([, question]) => data.questions[question][0]));
  const all = [...sums].map(([index, sum]) => {
    const samples = (task) => [...task.values()].map(([total, count]) => total / count);
    const setup = data.setups[index];
    return {
      setup,
      ranked: !setup.full && sum.tasks.size === tasks.size,
      // Every task counts once, however many subsets it has.
      average: estimate([...sum.whole.values()].map(samples), data.quantiles),
      tasks: data.tasks.map((_, task) =>
        sum.tasks.has(task) ? estimate([samples(sum.tasks.get(task))], data.quantiles) : null),
      bytes: sum.bytes / sum.count,
      share: sum.bytes / sum.full,
      speed: sum.tokens / sum.seconds,
    };
  });
  for (const row of all) {
    const better = all.filter((own) => own.ranked && own.setup.budget === row.setup.budget
      && own.average.mean > row.average.mean + EQUAL);
    row.rank = row.ranked ? better.length + 1 : null;
  }
  const size = (row) => row.setup.budget ?? Infinity;
  return all.sort((a, b) => (size(a) === size(b) ? 0 : size(b) - size(a))
    || b.setup.full - a.setup.full || b.ranked - a.ranked || b.average.mean - a.average.mean);
}

/** A bar from 0 to 1, with the interval as a line through its end. */
function bar({ mean, half }, kind) {
  const place = (value) => `${(100 * Math.min(1, Math.max(0, value))).toFixed(1)}%`;
  const ends = half === null ? "" : `;--low:${place(mean - half)};--high:${place(mean + half)}`;
  const name = `bar ${kind}${half === null ? " bare" : ""}`;
  return element("span", { class: name, style: `--mean:${place(mean)}${ends}` });
}

function intervalText({ half }) {
  return half === null ? "" : `± ${(100 * half).toFixed(1)}`;
}

function taskCell(task) {
  if (task === null) return element("td", {}, "–");
  const style = `--score:${task.mean.toFixed(3)}`;
  return element("td", { class: "score", style, title: intervalText(task) }, percent(task.mean));
}

function averageCell(average, kind) {
  const texts = [element("span", {}, percent(average.mean)), " ",
    element("small", {}, intervalText(average))];
  return element("td", {}, element("div", { class: "average" }, bar(average, kind), ...texts));
}

/** The columns: each row's value to sort by, whether the most come first, and the cell. */
function columns(data) {
  const text = (write) => (row) => element("td", {}, write(row));
  const number = (value, down, write) =>
    ({ value, down, cell: text((row) => known(value(row), write)) });
  const named = (row) =>
    element("th", { scope: "row" }, element("i", { class: `dot ${row.setup.class}` }),
      row.setup.policy);
  const tasks = data.tasks.map((_, task) => ({
    value: (row) => row.tasks[task]?.mean ?? NaN, down: true,
    cell: (row) => taskCell(row.tasks[task]),
  }));
  return [
    { value: (row) => row.rank ?? NaN, cell: text((row) => String(row.rank ?? "–")) },
    { value: (row) => row.setup.policy, cell: named },
    { value: (row) => row.setup.family, cell: text((row) => row.setup.family) },
    // The full cache is larger than any budget.
    { value: (row) => row.setup.budget ?? Number.MAX_VALUE, down: true,
      cell: text((row) => row.setup.label) },
    { value: (row) => row.average.mean, down: true,
      cell: (row) => averageCell(row.average, row.setup.class) },
    number((row) => row.bytes, false, bytes),
    number((row) => row.share, false, percent),
    number((row) => row.speed, true, significant),
    ...tasks,
  ];
}

/** Makes the heads sort. Returns what shows the view. */
function leaderboard(root, data) {
  const table = root.querySelector("table.board");
  const all = columns(data);
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, index) => {
    const button = element("button", { type: "button", title: "sort" }, ...head.childNodes);
    // A second click turns the order around, a third one goes back to the order by budget.
    const orders = all[index].down ? [`-${index}`, `${index}`] : [`${index}`, `-${index}`];
    const next = () => [...orders, null][orders.indexOf(view.sort) + 1];
    button.addEventListener("click", () => go({ sort: next() }));
    head.replaceChildren(button);
  });
  return () => {
    const shown = rows(data);
    const sorted = Number.parseInt(view.sort, 10);
    const index = Math.abs(sorted);
    heads.forEach((head, at) => head.removeAttribute("aria-sort"));
    let groups = Map.groupBy(shown, (row) => row.setup.budget);
    if (index in all) {
      const down = view.sort.startsWith("-");
      const unknown = (value) => typeof value === "number" && !Number.isFinite(value);
      // What is not known comes last in both directions.
      const order = (a, b) => (unknown(a) || unknown(b)
        ? unknown(a) - unknown(b)
        : (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1));
      shown.sort((a, b) => order(all[index].value(a), all[index].value(b)));
      heads[index].setAttribute("aria-sort", down ? "descending" : "ascending");
      groups = new Map([["", shown]]);
    }
    [...table.tBodies].forEach((body) => body.remove());
    for (const group of groups.values()) {
      const lines = group.map((row) => element("tr", {}, ...all.map(({ cell }) => cell(row))));
      table.append(element("tbody", {}, ...lines));
    }
  };
}

