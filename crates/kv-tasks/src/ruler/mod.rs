//! RULER (Hsieh et al. 2024): questions that are generated to a length in tokens.
//!
//! The prompts' words, the needles, their numbers and the haystacks are those of RULER's public
//! code. Its random numbers are not, so that questions differ from its files in what is drawn.

mod common_words;
mod documents;
mod fit;
mod frequent_words;
mod haystack;
mod needles;
mod variables;
mod words;

use kv_graders::Answer;
use serde::Deserialize;

use crate::data::Data;
use crate::{Question, QuestionOptions, TaskError, Tokens};

use common_words::CommonWords;
use documents::Documents;
use fit::Fit;
use frequent_words::FrequentWords;
use needles::Needles;
use variables::Variables;

/// RULER's own number of questions.
const QUESTIONS: usize = 500;

/// What is generated.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum Ruler {
    /// Needles in a haystack.
    Needles(Needles),
    /// Chains of variables that are assigned to each other.
    Variables(Variables),
    /// A list of words, some of them more common than others.
    CommonWords(CommonWords),
    /// Made-up words whose frequencies follow a zeta distribution.
    FrequentWords(FrequentWords),
    /// Questions about one document of many.
    Documents(Documents),
}

/// A generated prompt and its answer.
struct Prompt {
    context: String,
    question: String,
    answer_prefix: String,
    references: Vec<String>,
}

impl Prompt {
    fn text(&self) -> String {
        [self.context.as_str(), &self.question, &self.answer_prefix].concat()
    }
}

/// A generator of prompts: one for each question and size, which is the same at each call.
trait Generate {
    /// The least size that has all that is asked for.
    fn least(&self, question: usize) -> usize;

    /// The greatest size, if there is one.
    fn most(&self) -> usize {
        usize::MAX
    }

    /// The prompt of a question, which is longer the greater the size.
    fn prompt(&self, question: usize, size: usize) -> Prompt;

    /// How many questions there can be.
    fn questions(&self) -> usize {
        usize::MAX
    }
}

impl Ruler {
    /// The questions of a task, each as long as its length allows.
    pub(crate) fn questions(
        &self,
        task: &str,
        data: Option<&Data>,
        max_new_tokens: usize,
        options: &QuestionOptions,
        tokens: &dyn Tokens,
    ) -> Result<Vec<Question>, TaskError> {
        let length = options.length.ok_or_else(|| TaskError::NoLength { task: task.to_owned() })?;
        let fit = Fit { task, length, max_new_tokens, tokens };
        let generator: Box<dyn Generate + '_> = match self {
            Self::Needles(needles) => Box::new(needles.generator(task, options)?),
            Self::Variables(variables) => Box::new(variables.generator(options.seed, &fit)?),
            Self::CommonWords(words) => Box::new(words.generator(options.seed, length)),
            Self::FrequentWords(words) => Box::new(words.generator(options.seed, &fit)),
            Self::Documents(documents) => Box::new(documents.generator(task, data, options)?),
        };
        let count = options.limit.unwrap_or(QUESTIONS).min(generator.questions());
        let subset = task.rsplit('/').next().unwrap_or(task);
        let mut start = None;
        let mut questions = Vec::new();
        for number in 0..count {
            let fitted =
                fit.greatest(generator.least(number), generator.most(), start, |size| {
                    generator.prompt(number, size)
                })?;
            // Questions of one length have almost one size.
            start = Some(fitted.size);
            questions.push(Question {
                id: number.to_string(),
                context: fitted.prompt.context,
                question: fitted.prompt.question,
                answer: Answer::any(fitted.prompt.references),
                answer_prefix: fitted.prompt.answer_prefix,
                length: Some(fitted.tokens),
                subset: subset.to_owned(),
            });
        }
        Ok(questions)
    }

    /// The key and the expectation of a parameter that makes no questions, with its value.
    pub(crate) fn fault(&self) -> Option<(&'static str, &'static str, String)> {
        match self {
            Self::Needles(needles) => needles.fault(),
            Self::Variables(variables) => variables.fault(),
            Self::CommonWords(words) => words.fault(),
            Self::FrequentWords(words) => words.fault(),
            Self::Documents(_) => None,
        }
    }

    /// Whether the task reads documents from files.
    pub(crate) fn needs_data(&self) -> bool {
        matches!(self, Self::Documents(_))
    }
}
