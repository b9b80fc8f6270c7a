//! The leaderboard of `evaluate`: policies at each budget, ranked by the mean of tasks' averages.
//!
//! A page without scripts shows these rows; `leaderboard.js` makes the same ones anew under
//! filters.

use std::collections::BTreeMap;

use super::answers::{Answers, Setup};
use super::policies::Policies;
use super::svg::Ink;
use crate::format::{self, Kind, escape};
use crate::interval::Estimate;
use crate::record::{Record, metric};

/// What the columns say.
pub(super) const LEGEND: &str = "Rank: among the policies at one budget, by average; policies that \
    lack a task have none. Average: mean of the tasks' means, in which every task counts once, \
    however many subsets it has, with its 95 % confidence interval as a line through the bar. \
    Bytes held: keys and values in use, all slots' metadata and the policy's own state once the \
    prompt is compressed, a mean over answers. Of full: these bytes over the full cache's for the \
    same questions. Tokens/s: new tokens over the seconds of answers; all policies share the \
    prefill of a batch, so that each answer has an equal share of its time. Intervals take \
    questions as the samples, whatever their modes and repetitions, with Student's t distribution; \
    there are none where a task has fewer than two questions.";

/// Averages that differ by no more have one rank: sums in another order round in another way.
const EQUAL: f64 = 1e-9;

/// A policy at a budget.
#[derive(Debug)]
struct Row<'a> {
    setup: &'a Setup<'a>,
    /// From 1; none for the full cache, and for policies that lack a task.
    rank: Option<usize>,
    average: Estimate,
    tasks: Vec<Option<Estimate>>,
}

/// The table as an element of a page. Budgets follow each other from the largest to the smallest.
pub(super) fn html(answers: &Answers<'_>, policies: &Policies) -> String {
    let full = answers.full_bytes();
    let heads = ["rank", "policy", "family", "budget", "average"].map(String::from);
    // Long names may break behind their parts.
    let breaking = |name: &str| escape(name).replace('/', "/<wbr>").replace('_', "_<wbr>");
    let tasks = answers.tasks.iter().map(|task| breaking(task));
    let more = ["bytes held", "of full", "tokens/s"].map(String::from);
    let heads: String = heads
        .into_iter()
        .chain(more)
        .chain(tasks)
        .map(|head| format!(r#"<th scope="col">{head}</th>"#))
        .collect();
    let rows = rows(answers);
    let mut bodies = String::new();
    for of_budget in rows.chunk_by(|a, b| a.setup.budget == b.setup.budget) {
        let rows: String = of_budget.iter().map(|row| row.html(&full, policies)).collect();
        bodies += &format!("<tbody>{rows}</tbody>");
    }
    format!(
        r#"<div class="table" tabindex="0"><table class="board"><thead><tr>{heads}</tr></thead>
{bodies}</table></div>"#
    )
}

/// All rows: budgets from the largest, and in each the best policies first.
fn rows<'a>(answers: &'a Answers<'_>) -> Vec<Row<'a>> {
    let mut rows: Vec<Row<'a>> =
        answers.setups.iter().filter_map(|setup| Row::of(setup, answers)).collect();
    let size = |row: &Row<'_>| row.setup.budget.unwrap_or(f64::INFINITY);
    rows.sort_by(|a, b| {
        let full = |row: &Row<'_>| row.setup.is_full();
        let ranked = |row: &Row<'_>| row.is_ranked();
        let order = size(b).total_cmp(&size(a)).then(full(b).cmp(&full(a)));
        let order = order.then(ranked(b).cmp(&ranked(a)));
        order.then(b.average.mean.total_cmp(&a.average.mean))
    });
    let ranks: Vec<Option<usize>> = rows
        .iter()
        .map(|row| {
            let rivals = rows.iter().filter(|own| size(own) == size(row) && own.is_ranked());
            let least = row.average.mean + EQUAL;
            let better = rivals.filter(|own| own.average.mean > least).count();
            row.is_ranked().then_some(better + 1)
        })
        .collect();
    for (row, rank) in rows.iter_mut().zip(ranks) {
        row.rank = rank;
    }
    rows
}

impl<'a> Row<'a> {
    fn of(setup: &'a Setup<'a>, answers: &Answers<'_>) -> Option<Self> {
        let of_task = |task: &&str| {
            let own = |r: &&Record| r.case.task.as_deref().unwrap_or_default() == *task;
            let own: Vec<&Record> = setup.records.iter().copied().filter(own).collect();
            Estimate::of(&own, metric::SCORE)
        };
        let tasks = answers.tasks.iter().map(of_task).collect();
        Some(Self { setup, rank: None, average: setup.average()?, tasks })
    }

    fn is_ranked(&self) -> bool {
        !self.setup.is_full() && self.tasks.iter().all(Option::is_some)
    }

    fn html(&self, full: &BTreeMap<(usize, usize), f64>, policies: &Policies) -> String {
        let setup = self.setup;
        let class = Ink::of(policies.number(setup.policy)).class();
        let rank = self.rank.map_or("–".into(), |rank| rank.to_string());
        let share = |own: &Estimate| format::value(Kind::Share, own.mean);
        let interval = |own: &Estimate| own.interval.map(|own| format::interval(Kind::Share, own));
        let tasks: String = self
            .tasks
            .iter()
            .map(|task| match task {
                None => "<td>–</td>".into(),
                Some(task) => format!(
                    r#"<td class="score" style="--score:{:.3}" title="{}">{}</td>"#,
                    task.mean,
                    interval(task).unwrap_or_default(),
                    share(task)
                ),
            })
            .collect();
        let [own, whole] = setup.bytes(full);
        let known = |kind, value: f64| match value.is_nan() {
            true => "–".into(),
            false => format::value(kind, value),
        };
        let name = escape(setup.policy);
        let budget = format::budget(setup.budget);
        format!(
            r#"<tr><td>{rank}</td><th scope="row"><i class="dot {class}"></i>{name}</th>
<td>{family}</td><td>{budget}</td>
<td><div class="average">{bar}<span>{average}</span> <small>{interval}</small></div></td>
<td>{bytes}</td><td>{of_full}</td><td>{speed}</td>{tasks}</tr>
"#,
            family = setup.family(),
            bar = bar(&self.average, &class),
            average = share(&self.average),
            interval = interval(&self.average).unwrap_or_default(),
            bytes = known(Kind::Bytes, own),
            of_full = known(Kind::Share, own / whole),
            speed = known(Kind::Plain, setup.speed()),
        )
    }
}

/// A bar from 0 to 1, with the interval as a line through its end.
fn bar(average: &Estimate, class: &str) -> String {
    let place = |value: f64| format!("{:.1}%", 100.0 * value.clamp(0.0, 1.0));
    let (bare, ends) = match average.ends() {
        None => (" bare", String::new()),
        Some([low, high]) => ("", format!(";--low:{};--high:{}", place(low), place(high))),
    };
    let mean = place(average.mean);
    format!(r#"<span class="bar {class}{bare}" style="--mean:{mean}{ends}"></span>"#)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::test_records::evaluation;

    #[test]
    fn policies_are_ranked_within_a_budget_by_task_averages() {
        let mut records = evaluation();
        // A policy that lacks a task has no rank, however good it is.
        let mut lacking = records[0].clone();
        (lacking.policy, lacking.budget) = ("tova".into(), Some(0.5));
        records.push(lacking);
        let records: Vec<&Record> = records.iter().collect();
        let answers = Answers::of(&records);
        let rows = rows(&answers);
        let found: Vec<String> = rows
            .iter()
            .map(|row| {
                let rank = row.rank.map_or("–".into(), |rank| rank.to_string());
                let budget = format::budget(row.setup.budget);
                format!("{rank} {} {budget} {:.3}", row.setup.policy, row.average.mean)
            })
            .collect();
        let expected = [
            "– full – 1.000",
            "1 h2o 50 % 0.750",
            "2 snapkv 50 % 0.625",
            "– tova 50 % 1.000",
            "1 snapkv 25 % 0.625",
            "2 h2o 25 % 0.375",
        ];
        assert_eq!(found, expected);
        // Four needles count as much as two sums, and both have their spread.
        assert!(rows[2].average.interval.is_some());
        assert_eq!(rows[0].average.interval, None);
        let html = html(&answers, &Policies::of(&[]));
        assert_eq!(html.matches("<tbody>").count(), 3);
        for text in ["<span>62.5 %</span> <small>± ", "<td>500 B</td><td>50.0 %</td><td>8.00</td>"]
        {
            assert!(html.contains(text), "{text}: {html}");
        }
    }

    #[test]
    fn a_task_with_subsets_counts_once() {
        let mut records = evaluation();
        // The first two needles are a subset, which has a column of its own.
        for record in records.iter_mut().filter(|r| r.case.length < Some(400)) {
            if record.case.task.as_deref() == Some("needles") {
                record.case.task = Some("needles first".into());
            }
        }
        let records: Vec<&Record> = records.iter().collect();
        let answers = Answers::of(&records);
        assert_eq!(answers.tasks, ["needles", "needles first", "sums"]);
        assert_eq!(answers.whole_tasks, ["needles", "needles", "sums"]);
        let rows = rows(&answers);
        let averages: Vec<f64> = rows.iter().map(|row| row.average.mean).collect();
        assert_eq!(averages, [1.0, 0.75, 0.625, 0.625, 0.375]);
        let columns = rows[2].tasks.iter().map(|task| task.unwrap().mean);
        assert_eq!(columns.collect::<Vec<_>>(), [1.0, 0.5, 0.5]);
    }

    #[test]
    fn the_rounding_of_a_sum_makes_no_rank() {
        let mut records = evaluation();
        records.retain(|record| record.policy == "snapkv");
        let mut other = records.clone();
        for record in &mut other {
            record.policy = "tova".into();
            record.value *= if record.metric == metric::SCORE { 1.0 + 1e-12 } else { 1.0 };
        }
        records.extend(other);
        let records: Vec<&Record> = records.iter().collect();
        let answers = Answers::of(&records);
        assert!(rows(&answers).iter().all(|row| row.rank == Some(1)));
    }
}
