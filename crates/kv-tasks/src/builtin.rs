//! The built-in tasks, a TOML file each.

use crate::TaskError;

macro_rules! tasks {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../assets/tasks/", $name, ".toml")))),*]
    };
}

/// Names and TOML.
pub(crate) const TASKS: &[(&str, &str)] = tasks!["gsm8k",];

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
