//! Questions of `evaluate`, with the outputs of policies side by side.

use serde::Serialize;

/// Questions that a page shows at most.
pub(super) const MOST_QUESTIONS: usize = 200;
/// Answers that a page shows at most, which bounds its size where many policies ran.
pub(super) const MOST_ANSWERS: usize = 6_000;
/// Characters of a prompt's end, of an output, and of a reference answer.
const PROMPT: usize = 1_500;
const OUTPUT: usize = 600;
const REFERENCE: usize = 200;
/// Reference answers.
const REFERENCES: usize = 10;

/// A question with the answers of policies.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ShownQuestion {
    task: String,
    /// Its name in the task.
    name: String,
    /// Tokens of the prompt.
    length: usize,
    /// The prompt's end.
    prompt: Text,
    references: Vec<Text>,
    /// Reference answers that are left out.
    more_references: usize,
    /// Its answers.
    pub(crate) answers: Vec<ShownAnswer>,
}

/// A policy's answer to a question.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ShownAnswer {
    /// The policy's label in records.
    pub(crate) policy: String,
    /// Its budget in records.
    pub(crate) budget: Option<f64>,
    /// Whether the question is known at compression, one of [`crate::record::mode`].
    pub(crate) mode: String,
    /// The number of the sample, from 0.
    pub(crate) sample: usize,
    /// The generated text.
    pub(crate) output: String,
    /// Why it ended: `length`, `end` or `stop`.
    pub(crate) finish: String,
    /// 0 to 1.
    pub(crate) score: f64,
    /// New tokens.
    pub(crate) tokens: usize,
    /// Live bytes once the prompt is compressed.
    pub(crate) bytes: usize,
    /// Its share of its batch's time.
    pub(crate) seconds: f64,
    /// What was held of the prompt: a hexadecimal digit for each stretch.
    pub(crate) kept: Option<String>,
}

/// A text, and how many characters of it are left out.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Text {
    text: String,
    cut: usize,
}

impl ShownQuestion {
    /// A question without answers yet. Of the prompt, only the end is kept.
    pub(crate) fn new(
        task: String,
        name: &str,
        length: usize,
        prompt: &str,
        references: &[String],
    ) -> Self {
        let more_references = references.len().saturating_sub(REFERENCES);
        let references = references.iter().take(REFERENCES);
        Self {
            task,
            name: name.into(),
            length,
            prompt: Text::end(prompt, PROMPT),
            references: references.map(|text| Text::start(text, REFERENCE)).collect(),
            more_references,
            answers: Vec::new(),
        }
    }
}

impl Text {
    fn start(text: &str, most: usize) -> Self {
        let cut = text.chars().count().saturating_sub(most);
        Self { text: text.chars().take(most).collect(), cut }
    }

    fn end(text: &str, most: usize) -> Self {
        let cut = text.chars().count().saturating_sub(most);
        Self { text: text.chars().skip(cut).collect(), cut }
    }
}

impl Serialize for ShownAnswer {
    /// As an object, with the output's beginning in place of the output.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Shown<'a> {
            policy: &'a str,
            budget: Option<f64>,
            mode: &'a str,
            sample: usize,
            output: Text,
            finish: &'a str,
            score: f64,
            tokens: usize,
            bytes: usize,
            seconds: f64,
            kept: Option<&'a str>,
        }
        Shown {
            policy: &self.policy,
            budget: self.budget,
            mode: &self.mode,
            sample: self.sample,
            output: Text::start(&self.output, OUTPUT),
            finish: &self.finish,
            score: self.score,
            tokens: self.tokens,
            bytes: self.bytes,
            seconds: self.seconds,
            kept: self.kept.as_deref(),
        }
        .serialize(serializer)
    }
}

/// The questions that a page shows, in their order: equally many of each task where there are too
/// many, the first ones of a task first.
pub(super) fn chosen(questions: &[ShownQuestion]) -> Vec<&ShownQuestion> {
    let answers = questions.iter().map(|question| question.answers.len()).max().unwrap_or(0);
    let most = (MOST_ANSWERS / answers.max(1)).clamp(1, MOST_QUESTIONS);
    let mut counts: Vec<(&str, usize)> = Vec::new();
    let mut order: Vec<(usize, usize)> = Vec::new();
    for (index, question) in questions.iter().enumerate() {
        let place = counts.iter().rposition(|(task, _)| *task == question.task);
        let place = place.unwrap_or_else(|| {
            counts.push((&question.task, 0));
            counts.len() - 1
        });
        order.push((counts[place].1, index));
        counts[place].1 += 1;
    }
    order.sort_unstable();
    let mut indices: Vec<usize> = order.into_iter().take(most).map(|(_, index)| index).collect();
    indices.sort_unstable();
    indices.into_iter().map(|index| &questions[index]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(task: &str, name: &str) -> ShownQuestion {
        ShownQuestion::new(task.into(), name, 9, "prompt", &[])
    }

    #[test]
    fn questions_are_spread_over_tasks() {
        let mut questions: Vec<ShownQuestion> =
            (0..300).map(|i| question("a", &i.to_string())).collect();
        questions.extend((0..50).map(|i| question("b", &i.to_string())));
        let count = |questions: &[&ShownQuestion], task: &str| {
            questions.iter().filter(|question| question.task == task).count()
        };
        let all = chosen(&questions);
        assert_eq!((count(&all, "a"), count(&all, "b")), (150, 50));
        assert_eq!((all[0].name.as_str(), all[149].name.as_str()), ("0", "149"));
        let answer = ShownAnswer {
            policy: "full".into(),
            budget: None,
            mode: String::new(),
            sample: 0,
            output: "x".repeat(700),
            finish: "stop".into(),
            score: 1.0,
            tokens: 1,
            bytes: 1,
            seconds: 1.0,
            kept: None,
        };
        questions[0].answers = vec![answer; 1000];
        let few = chosen(&questions);
        assert_eq!((count(&few, "a"), count(&few, "b")), (3, 3));
        let text = serde_json::to_value(few[0]).unwrap();
        assert_eq!(text["answers"][0]["output"]["cut"], 100);
        questions[0].answers = vec![questions[0].answers[0].clone(); 9000];
        assert_eq!(chosen(&questions).len(), 1);
        assert!(chosen(&[]).is_empty());
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let references: Vec<String> = (0..12).map(|i| format!("{i}")).collect();
        let prompt = "é".repeat(2_000) + "?";
        let question = ShownQuestion::new("a".into(), "1", 9, &prompt, &references);
        assert_eq!(question.prompt.cut, 501);
        assert!(question.prompt.text.ends_with("é?"));
        assert_eq!((question.references.len(), question.more_references), (10, 2));
    }
}
