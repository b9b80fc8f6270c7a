//! What a task gives: questions, and how many of them and of what length.

use std::path::PathBuf;

use kv_graders::Answer;

/// One question to a model. The model reads `context`, `question` and `answer_prefix`, and
/// continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// The data set's identifier of the question, or its number in the file, from 1.
    pub id: String,
    /// What may be compressed without the question in sight.
    pub context: String,
    /// What follows the context: the question and the cue of the answer.
    pub question: String,
    /// What the output is compared with.
    pub answer: Answer,
    /// Text that the model is given before its answer begins (the "answer prefix" of RULER). May be
    /// empty. Where the question is asked through a chat template, it opens the model's turn.
    pub answer_prefix: String,
    /// Tokens of context, question and answer prefix, where the task generated them to a length.
    pub length: Option<usize>,
    /// Sub-task or subset, such as `niah_single_1`.
    pub subset: String,
}

/// Which questions to read or make.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuestionOptions {
    /// A local copy of the data set. Without it the data set is read from the hub. A folder in it
    /// that has the task's name has the task's files.
    pub folder: Option<PathBuf>,
    /// Of a generated task: the tokens of the prompt and of the answer to come, together. Of other
    /// tasks: the most tokens of a prompt, which loses its middle above that, as LongBench does it.
    pub length: Option<usize>,
    /// The most questions. The first ones are taken.
    pub limit: Option<usize>,
    /// The seed of everything that is drawn: generated questions, examples, orders of choices.
    pub seed: u64,
    /// The text in which RULER hides its needles: a text file, or a JSON file with the key `text`.
    pub text: Option<PathBuf>,
    /// How many solved examples come before the question. Without it the task's own number. More
    /// than 0 is an error of a task that has none.
    pub few_shot: Option<usize>,
}
