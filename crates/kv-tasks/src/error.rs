//! Why a task or its questions could not be had.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why a task or its questions could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TaskError {
    /// No built-in task has this name. [`Task::names`](crate::Task::names) lists all.
    #[error("there is no task named {name:?}; did you mean {nearest:?}?")]
    UnknownTask {
        /// The name that was given.
        name: String,
        /// The known name that is most similar.
        nearest: &'static str,
    },
    /// The TOML of a task is malformed, lacks a key or has an unknown one.
    #[error("this is no task: {0}")]
    Toml(#[from] toml::de::Error),
    /// The TOML of a task is well-formed, but says something impossible.
    #[error("the task {task:?} has {key} = {actual}, expected {expected}")]
    Invalid {
        /// The task.
        task: String,
        /// The key in the TOML.
        key: String,
        /// What the key should have.
        expected: &'static str,
        /// What it has.
        actual: String,
    },
    /// A template or an expression of a task does not parse, or fails on a row.
    #[error("the template `{part}` of the task {task:?} fails{}: {reason}", at(place))]
    Template {
        /// The task.
        task: String,
        /// The key of the template in the TOML.
        part: &'static str,
        /// The row, if the template parsed.
        place: Option<Place>,
        /// What the template engine says.
        reason: String,
    },
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The folder has none of the files that the task reads.
    #[error(
        "{} has no file for the task {task:?}: expected one of {}{}", folder.display(),
        expected.join(", "), from_hub(repository)
    )]
    NoFile {
        /// The task.
        task: String,
        /// The folder that was given.
        folder: PathBuf,
        /// The names and patterns of files that would do.
        expected: Vec<String>,
        /// Where the files can be had.
        repository: Option<String>,
    },
    /// The task reads a local folder, and none was given.
    #[error(
        "the task {task:?} is not on the hub in a form that is read here: give a folder with one \
         of {}", expected.join(", ")
    )]
    NoFolder {
        /// The task.
        task: String,
        /// The names and patterns of files that would do.
        expected: Vec<String>,
    },
    /// A file has an ending of none of the formats that are read.
    #[error(
        "{} is of no known format: expected .jsonl, .json, .parquet, .csv or .zip", path.display()
    )]
    Format {
        /// The file.
        path: PathBuf,
    },
    /// JSON is malformed.
    #[error("malformed JSON at {place}: {reason}; correct it or remove it")]
    Json {
        /// The file and line.
        place: Place,
        /// What the parser says.
        reason: String,
    },
    /// JSON is well-formed, but no table of rows.
    #[error("{} has no rows: expected {expected}, got {actual}", path.display())]
    NoRows {
        /// The file.
        path: PathBuf,
        /// The form that was expected.
        expected: String,
        /// What is there.
        actual: String,
    },
    /// The columns of a table differ in length.
    #[error(
        "the column {column:?} of {} has {actual} rows, expected {expected} as in the column \
         {first:?}", path.display()
    )]
    Uneven {
        /// The file.
        path: PathBuf,
        /// The column.
        column: String,
        /// The column that it is compared with.
        first: String,
        /// The rows of that column.
        expected: usize,
        /// The rows of the column.
        actual: usize,
    },
    /// A Parquet, CSV or ZIP file is malformed.
    #[error("{place} is no valid {format}: {reason}; mend it, or download it again")]
    Malformed {
        /// The file, and the row if the file could be opened.
        place: Place,
        /// The format.
        format: &'static str,
        /// What the reader says.
        reason: String,
    },
    /// A row has a column that is not read, and that resembles one that it lacks.
    #[error("{place} has a column {column:?}, which is not read; did you mean {nearest:?}?")]
    MisspeltColumn {
        /// The row.
        place: Place,
        /// The column.
        column: String,
        /// The column that is read.
        nearest: &'static str,
    },
    /// A row lacks a column that the task reads.
    #[error(
        "{place} has no column {column:?}, which `{part}` of the task {task:?} reads; it has {}",
        columns.join(", ")
    )]
    MissingColumn {
        /// The row.
        place: Place,
        /// The column.
        column: String,
        /// The key of the template in the TOML.
        part: &'static str,
        /// The task.
        task: Box<str>,
        /// The columns that the row has.
        columns: Box<[String]>,
    },
    /// An expression should give texts, and gives something else.
    #[error("`{part}` of {place} is {actual}, expected a text, a number or a list of these")]
    NotText {
        /// The row.
        place: Place,
        /// The key of the expression in the TOML.
        part: &'static str,
        /// What it gives.
        actual: String,
    },
    /// A column of a user's file should have a count.
    #[error("`{column}` of {place} is {actual}, expected a whole number of at least 1")]
    NotCount {
        /// The row.
        place: Place,
        /// The column.
        column: &'static str,
        /// What it has.
        actual: String,
    },
    /// A row has no reference answer that is more than white space.
    #[error("{place} has an empty answer; correct it or remove the row")]
    EmptyAnswer {
        /// The row.
        place: Place,
    },
    /// The rows of a user's file ask for different graders, lengths or cuts.
    #[error(
        "{place} has {key} = {actual}, expected {expected} as the first row has: use one file each"
    )]
    Mixed {
        /// The row.
        place: Place,
        /// The column.
        key: &'static str,
        /// The value of the first row.
        expected: String,
        /// The value of this row.
        actual: String,
    },
    /// A user's file names a grader or a cut that does not exist.
    #[error("{place}: {source}")]
    UnknownName {
        /// The row.
        place: Place,
        /// What is unknown, and the nearest name.
        source: kv_graders::UnknownName,
    },
    /// A file has no row that the task can ask.
    #[error("{} has no question for the task {task:?}", path.display())]
    NoQuestions {
        /// The task.
        task: String,
        /// The file or folder.
        path: PathBuf,
    },
    /// There are fewer examples than the question should have before it.
    #[error("the task {task:?} has {actual} solved examples, expected at least {expected}")]
    FewExamples {
        /// The task.
        task: String,
        /// How many were asked for.
        expected: usize,
        /// How many there are.
        actual: usize,
    },
    /// The tokenizer refuses a text or tokens.
    #[error("the tokenizer fails on a question of {task:?}: {reason}")]
    Tokenizer {
        /// The task.
        task: String,
        /// The tokenizer's message.
        reason: String,
    },
    /// The prompt without its context is longer than the prompt may be.
    #[error(
        "a prompt of {task:?} needs at least {needed} tokens, expected at most {length}: ask for a \
         greater length"
    )]
    TooLong {
        /// The task.
        task: String,
        /// The length that was asked for.
        length: usize,
        /// The least length that would do.
        needed: usize,
    },
    /// The task is generated to a length, and none was given.
    #[error("the task {task:?} is generated: give the length in tokens, such as 4096")]
    NoLength {
        /// The task.
        task: String,
    },
    /// The task hides its needles in a text, and none was given.
    #[error(
        "the task {task:?} hides its needles in a text: give a file with one (RULER's own is the \
         essays of Paul Graham)"
    )]
    NoText {
        /// The task.
        task: String,
    },
    /// The text of needles has no words.
    #[error("{} has no words to hide needles in", path.display())]
    EmptyText {
        /// The file.
        path: PathBuf,
    },
    /// Hub access is off and the cache has not all files.
    #[error(
        "offline, and {} has no complete copy of {repository}: missing {missing}; give a folder \
         with the files, or unset HF_HUB_OFFLINE", cache.display()
    )]
    Offline {
        /// The data set.
        repository: String,
        /// The first name or pattern without a file.
        missing: String,
        /// The cache of the hub.
        cache: PathBuf,
    },
    /// The hub has no such data set, or not for this user.
    #[error(
        "the hub refuses the data set {repository} (HTTP {status}): check its name, accept its \
         terms on its page, and set HF_TOKEN"
    )]
    NotOnHub {
        /// The data set.
        repository: String,
        /// The HTTP status.
        status: u16,
    },
    /// The data set on the hub lacks a file.
    #[error("the data set {repository} has no file {missing}; give a folder with the files")]
    NotInDataSet {
        /// The data set.
        repository: String,
        /// The name or pattern without a file.
        missing: String,
    },
    /// The hub cannot be reached.
    #[error("cannot read {repository} from the hub: {reason}; give a folder with the files")]
    Unavailable {
        /// The data set.
        repository: String,
        /// What the client says.
        reason: String,
    },
}

impl TaskError {
    pub(crate) fn io(path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }
}

/// A row of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: Arc<Path>,
    /// The number of the row from 1, in the unit that the file's format counts in.
    pub row: Option<(&'static str, usize)>,
}

impl Place {
    pub(crate) fn file(path: &Path) -> Self {
        Self { path: path.into(), row: None }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.row {
            Some((unit, number)) => write!(f, "{}, {unit} {number}", self.path.display()),
            None => write!(f, "{}", self.path.display()),
        }
    }
}

fn at(place: &Option<Place>) -> String {
    place.as_ref().map_or_else(String::new, |place| format!(" on {place}"))
}

fn from_hub(repository: &Option<String>) -> String {
    match repository {
        Some(repository) => format!("; they are in the data set {repository} of the hub"),
        None => String::new(),
    }
}
