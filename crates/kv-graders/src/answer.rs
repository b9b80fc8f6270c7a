//! What an output is compared with.

use serde::{Deserialize, Serialize};

use crate::GradeError;

/// What an output is compared with: reference answers, wrong answers, and the classes of the task.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Answer {
    /// The correct answers. One is enough, unless the grader says otherwise.
    pub references: Vec<String>,
    /// All classes of a classification task, or the texts of the choices of a question, in order.
    pub classes: Vec<String>,
    /// Wrong answers, for TruthfulQA.
    pub wrong: Vec<String>,
}

impl Answer {
    /// An answer with one reference.
    pub fn one(reference: impl Into<String>) -> Self {
        Self::any([reference])
    }

    /// An answer with several references.
    pub fn any<S: Into<String>>(references: impl IntoIterator<Item = S>) -> Self {
        Self { references: strings(references), ..Self::default() }
    }

    /// The same references, with `classes`.
    pub fn with_classes<S: Into<String>>(self, classes: impl IntoIterator<Item = S>) -> Self {
        Self { classes: strings(classes), ..self }
    }

    /// The same references, with `wrong` answers.
    pub fn with_wrong<S: Into<String>>(self, wrong: impl IntoIterator<Item = S>) -> Self {
        Self { wrong: strings(wrong), ..self }
    }

    /// The highest score over the references.
    pub(crate) fn best(&self, score: impl Fn(&str) -> f64) -> f64 {
        self.references.iter().map(|reference| score(reference)).fold(0.0, f64::max)
    }

    /// The highest score over the references, or the first error.
    pub(crate) fn try_best(
        &self,
        score: impl Fn(&str) -> Result<f64, GradeError>,
    ) -> Result<f64, GradeError> {
        self.references.iter().try_fold(0.0, |best: f64, reference| Ok(best.max(score(reference)?)))
    }
}

fn strings<S: Into<String>>(strings: impl IntoIterator<Item = S>) -> Vec<String> {
    strings.into_iter().map(Into::into).collect()
}
