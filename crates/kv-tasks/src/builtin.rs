//! The built-in tasks, a TOML file each.

use crate::TaskError;

macro_rules! tasks {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../assets/tasks/", $name, ".toml")))),*]
    };
}

/// Names and TOML.
pub(crate) const TASKS: &[(&str, &str)] = tasks![
    "gsm8k",
    "ruler/niah_single_1",
    "ruler/niah_single_2",
    "ruler/niah_single_3",
    "ruler/niah_multikey_1",
    "ruler/niah_multikey_2",
    "ruler/niah_multikey_3",
    "ruler/niah_multivalue",
    "ruler/niah_multiquery",
    "ruler/vt",
    "ruler/cwe",
    "ruler/fwe",
    "ruler/qa_1",
    "ruler/qa_2",
];

/// The TOML of a built-in task.
pub(crate) fn toml(name: &str) -> Result<&'static str, TaskError> {
    if let Some((_, toml)) = TASKS.iter().find(|(known, _)| *known == name) {
        return Ok(toml);
    }
    let similarity = |known: &str| strsim::jaro_winkler(&name.to_lowercase(), known);
    let names = TASKS.iter().map(|(known, _)| *known);
    let nearest = names.max_by(|a, b| similarity(a).total_cmp(&similarity(b))).unwrap_or_default();
    Err(TaskError::UnknownTask { name: name.to_owned(), nearest })
}
