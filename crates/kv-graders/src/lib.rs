#![doc = include_str!("../README.md")]

mod answer;
mod bleu;
mod boxed;
mod choice;
mod classification;
mod code;
mod count;
mod cut;
mod error;
mod grader;
mod lcs;
mod math;
mod number;
mod plain;
mod ratcliff;
mod rouge;
mod rouge_score;
mod ruler;
mod squad;
mod text;
mod truthful;

pub use answer::Answer;
pub use boxed::last_boxed;
pub use cut::Cut;
pub use error::{GradeError, UnknownName};
pub use grader::Grader;
pub use math::{equivalent, math_is_equiv};
