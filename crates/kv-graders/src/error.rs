//! Errors of graders, and of names in task files.

use crate::Grader;

/// Why an output could not be graded. All of these are faults of the task, not of the output: an
/// output that says nothing useful scores 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GradeError {
    /// The answer has no reference.
    #[error("`{grader}` needs at least one reference, got none")]
    NoReferences {
        /// The grader.
        grader: Grader,
    },
    /// The answer has no classes, and the grader needs them.
    #[error("`{grader}` needs the classes of the task, got none")]
    NoClasses {
        /// The grader.
        grader: Grader,
    },
    /// The answer has no wrong answers, and the grader needs them.
    #[error("`{grader}` needs wrong answers too, got none")]
    NoWrong {
        /// The grader.
        grader: Grader,
    },
    /// A reference has another form than the grader needs.
    #[error("`{grader}` needs references with {expected}, got {reference:?}")]
    Reference {
        /// The grader.
        grader: Grader,
        /// The form that the grader needs.
        expected: &'static str,
        /// The reference.
        reference: String,
    },
}

/// A name in a task file that nothing here has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no {kind} named {name:?}; did you mean {nearest:?}? All: {all}")]
pub struct UnknownName {
    /// What the name should name.
    pub kind: &'static str,
    /// The name that was given.
    pub name: String,
    /// The known name with the highest Jaro-Winkler similarity to it.
    pub nearest: &'static str,
    /// All known names, with commas between them.
    pub all: String,
}

impl UnknownName {
    pub(crate) fn new(kind: &'static str, name: &str, known: &[&'static str]) -> Self {
        let similarity = |known: &str| strsim::jaro_winkler(&name.to_lowercase(), known);
        let nearest = known
            .iter()
            .copied()
            .max_by(|a, b| similarity(a).total_cmp(&similarity(b)))
            .unwrap_or_default();
        Self { kind, name: name.to_owned(), nearest, all: known.join(", ") }
    }
}
