// The list of questions, and the page of one: outputs of policies side by side, each with a strip
// of what it held of the prompt.

/** A text that may be cut, with the number of characters that are left out before or behind it. */
function cutText({ text, cut }, before) {
  if (cut === 0) return [text];
  const note = element("em", {}, ` … ${cut.toLocaleString("en")} characters left out … `);
  return before ? [note, text] : [text, note];
}

/** The prompt from left to right, in a stronger colour where more of it is held. */
function strip(kept) {
  if (!kept) return element("span", { class: "none" }, "–");
  const digits = [...kept].map((digit) => Number.parseInt(digit, 16));
  const ink = (digit) => {
    // What is held at all must be seen.
    const share = digit === 0 ? 0 : 12 + (88 * digit) / 15;
    return `color-mix(in srgb, var(--strip) ${share.toFixed(0)}%, var(--raised))`;
  };
  const place = (index) => `${((100 * index) / digits.length).toFixed(2)}%`;
  const stops = digits.map((digit, at) => `${ink(digit)} ${place(at)} ${place(at + 1)}`);
  const share = digits.reduce((sum, digit) => sum + digit, 0) / (15 * digits.length);
  const label = `holds about ${Math.round(100 * share)} % of the prompt`;
  return element("div", {
    class: "strip", role: "img", "aria-label": label, title: label, "data-kept": kept,
    style: `background:linear-gradient(to right, ${stops.join(", ")})`,
  });
}

/** A table whose columns are heads with what they say of an item. */
function tableOf(kind, columns, items) {
  const heads = columns.map(([head]) => element("th", { scope: "col" }, head));
  const cells = (item) => columns.map(([, write, name]) =>
    element("td", { class: name ?? null }, ...[write(item)].flat()));
  const lines = items.map((item) => element("tr", {}, ...cells(item)));
  const table = element("table", { class: kind },
    element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...lines));
  return element("div", { class: "table", tabindex: "0" }, table);
}

/** The answers of a question that the view shows: the full cache's, then budget by budget. */
function answersOf(question, setupOf) {
  const size = (answer) => answer.budget ?? Infinity;
  return question.answers
    .filter((answer) => showsSetup(setupOf(answer)) && showsMode(answer.mode))
    .sort((a, b) => (size(a) === size(b) ? 0 : size(b) - size(a)));
}

function answerTable(answers, setupOf, several) {
  const dot = (answer) => element("i", { class: `dot ${setupOf(answer).class}` });
  const optional = [["mode", (own) => own.mode], ["sample", (own) => String(own.sample + 1)]];
  return tableOf("answers", [
    ["policy", (own) => [dot(own), own.policy], "policy"],
    ["budget", (own) => setupOf(own).label],
    ...optional.filter(([name]) => several(name)),
    ["score", (own) => element(own.score === 1 ? "b" : "span", {}, percent(own.score))],
    ["output", (own) => element("div", {}, ...cutText(own.output, false)), "output"],
    ["held of the prompt", (own) => strip(own.kept), "held"],
    ["tokens", (own) => String(own.tokens)],
    ["ended by", (own) => own.finish],
    ["bytes held", (own) => bytes(own.bytes)],
    ["seconds", (own) => significant(own.seconds)],
  ], answers);
}

/** The page of a question, with links to the shown ones before and behind it. */
function questionPage(question, index, shown, setupOf) {
  const link = (to, text) => element("a", { href: hashOf({ question: to }) }, text);
  const links = [link(null, "All questions")];
  const [before, next] =
    [shown.findLast((other) => other < index), shown.find((other) => other > index)];
  if (before !== undefined) links.push(link(String(before), "← before"));
  if (next !== undefined) links.push(link(String(next), "next →"));
  const references = question.references.map((text) => element("li", {}, ...cutText(text, false)));
  if (question.more_references > 0) {
    references.push(element("li", {}, element("em", {}, `${question.more_references} more`)));
  }
  const answers = answersOf(question, setupOf);
  const several = (name) => new Set(answers.map((answer) => answer[name])).size > 1;
  return [
    element("p", { class: "links" }, ...links),
    element("h4", {}, `${question.task} · ${question.name} `,
      element("small", {}, `${question.length.toLocaleString("en")} tokens`)),
    element("pre", {}, ...cutText(question.prompt, true)),
    element("div", { class: "references" }, "Expected: ", element("ul", {}, ...references)),
    answerTable(answers, setupOf, several),
  ];
}

/** Fills the places of questions. Returns what shows the view. */
function questions(root, data) {
  const [page, list] = [root.querySelector(".question"), root.querySelector(".list")];
  if (page === null) return () => {};
  const setups = new Map(data.setups.map((setup) => [`${setup.policy} ${setup.budget}`, setup]));
  const setupOf = (answer) => setups.get(`${answer.policy} ${answer.budget}`);
  const find = element("input", { type: "search", placeholder: "name or text" });
  find.addEventListener("change", () => go({ find: find.value }));
  const label = element("label", {}, "Find", find);
  page.before(element("form", { class: "filters", hidden: "" }, label));
  const mean = (answers) =>
    known(answers.reduce((sum, own) => sum + own.score, 0) / answers.length, percent);
  const fits = (question) => {
    const text = `${question.name} ${question.prompt.text}`.toLowerCase();
    return showsQuestion(question.task, question.length)
      && text.includes((view.find ?? "").toLowerCase());
  };
  let open;
  return () => {
    find.value = view.find ?? "";
    const question = /^\d+$/.test(view.question) ? data.shown[view.question] : undefined;
    const shown = data.shown.map((own, index) => [own, index, answersOf(own, setupOf)])
      .filter(([own]) => fits(own));
    page.hidden = question === undefined;
    page.replaceChildren();
    if (question) {
      const indexes = shown.map(([, index]) => index);
      page.append(...questionPage(question, Number(view.question), indexes, setupOf));
      // The question stands at the prompt's end.
      const prompt = page.querySelector("pre");
      prompt.scrollTop = prompt.scrollHeight;
    }
    const of = (answers, full) => answers.filter((answer) => setupOf(answer).full === full);
    list.replaceChildren(tableOf("list", [
      ["question", ([own, index]) =>
        element("a", { href: hashOf({ question: String(index) }) }, own.name)],
      ["task", ([own]) => own.task],
      ["tokens", ([own]) => own.length.toLocaleString("en")],
      ["full cache", ([, , answers]) => mean(of(answers, true))],
      ["other policies", ([, , answers]) => mean(of(answers, false))],
    ], shown));
    list.hidden = question !== undefined;
    if (question && view.question !== open) page.closest("section").scrollIntoView();
    open = question && view.question;
  };
}
