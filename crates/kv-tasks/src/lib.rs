#![doc = include_str!("../README.md")]

mod builtin;
mod choices;
mod data;
mod error;
mod few_shot;
mod filters;
mod hub;
mod literal;
mod question;
mod random;
mod render;
mod row_task;
mod rows;
mod ruler;
mod task;
mod tokens;
mod truncate;

pub use error::{Place, TaskError};
pub use question::{Question, QuestionOptions};
pub use task::Task;
pub use tokens::Tokens;
