//! Where the rows of a task are: a local folder, or a data set of the hub.

use std::path::{Component, Path, PathBuf};

use glob::{MatchOptions, Pattern};
use serde::Deserialize;
use walkdir::WalkDir;

use crate::TaskError;
use crate::builtin::TASKS;
use crate::hub;
use crate::rows::RowFile;

/// Where the rows of a task are.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Data {
    /// A data set of the hub, `organisation/name`.
    pub(crate) repository: Option<String>,
    /// Its branch or commit. `main` by default.
    pub(crate) revision: Option<String>,
    /// The files there: names, or patterns with `*`.
    pub(crate) files: Vec<String>,
    /// Other names or patterns of the files in a local folder, tried in order before `files`.
    pub(crate) local: Vec<String>,
    /// The file in `files`, where that is a ZIP archive.
    pub(crate) member: Option<String>,
    /// The key of the rows in a JSON object.
    pub(crate) records: Option<String>,
    /// A column with a list of objects, each of which is a row with the other columns.
    pub(crate) each: Option<String>,
    /// A file of the user's, instead of all that.
    #[serde(skip)]
    pub(crate) path: Option<PathBuf>,
}

impl Data {
    /// The files with the rows, in order.
    pub(crate) fn files(
        &self,
        task: &str,
        folder: Option<&Path>,
    ) -> Result<Vec<RowFile>, TaskError> {
        let paths = match (&self.path, folder, &self.repository) {
            (Some(path), _, _) => vec![path.clone()],
            (None, Some(folder), _) => self.local(task, folder)?,
            (None, None, Some(repository)) if !self.files.is_empty() => {
                hub::files(repository, self.revision.as_deref(), &self.files)?
            }
            _ => {
                let expected = self.names();
                return Err(TaskError::NoFolder { task: task.to_owned(), expected });
            }
        };
        Ok(paths.into_iter().map(|path| self.file(path)).collect())
    }

    fn file(&self, path: PathBuf) -> RowFile {
        RowFile { path, member: self.member.clone(), records: self.records.clone() }
    }

    fn names(&self) -> Vec<String> {
        self.local.iter().chain(&self.files).cloned().collect()
    }

    /// The files that match the first name or pattern that any matches: in the folder's own folder
    /// for the task if there is one, else in the folder.
    fn local(&self, task: &str, folder: &Path) -> Result<Vec<PathBuf>, TaskError> {
        let own = folder.join(task);
        let plain = Path::new(task).components().all(|part| matches!(part, Component::Normal(_)));
        let has_own = plain && own.is_dir();
        let other = || TASKS.iter().any(|(name, _)| folder.join(name).is_dir());
        // Beside folders of other tasks a pattern such as `**/test*` would match their files.
        let names = match !has_own && !self.local.is_empty() && other() {
            true => self.local.clone(),
            false => self.names(),
        };
        let folder = if has_own { &own } else { folder };
        let files = list(folder)?;
        for name in &names {
            let found: Vec<_> = files.iter().filter(|file| matches(name, file)).collect();
            if !found.is_empty() {
                return Ok(found.into_iter().map(|file| folder.join(file)).collect());
            }
        }
        Err(TaskError::NoFile {
            task: task.to_owned(),
            folder: folder.to_path_buf(),
            expected: names,
            repository: self.repository.clone(),
        })
    }
}

/// Whether a name is `organisation/name` in the hub's alphabet, which rules out paths.
pub(crate) fn is_hub_id(name: &str) -> bool {
    let part = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    name.split_once('/').is_some_and(|(organisation, name)| part(organisation) && part(name))
}

/// Whether the pattern matches the path of a file in its folder. `*` matches no `/`.
pub(crate) fn matches(pattern: &str, file: &str) -> bool {
    let options = MatchOptions { require_literal_separator: true, ..MatchOptions::default() };
    Pattern::new(pattern).is_ok_and(|pattern| pattern.matches_with(file, options))
}

/// Whether a name of files parses as a pattern.
pub(crate) fn is_pattern(name: &str) -> bool {
    !name.starts_with('/') && Pattern::new(name).is_ok()
}

/// The paths of all files in a folder, relative to it, in order.
pub(crate) fn list(folder: &Path) -> Result<Vec<String>, TaskError> {
    let mut names = Vec::new();
    // Deep enough for `data/task/split/part.parquet`.
    let walk = WalkDir::new(folder).follow_links(true).max_depth(4).sort_by_file_name();
    for entry in walk {
        let entry = match entry {
            Ok(entry) => entry,
            // A broken link inside is no file; a folder that is not there is an error.
            Err(error) if error.depth() > 0 => continue,
            Err(error) => return Err(TaskError::io(folder, error.into())),
        };
        if entry.depth() == 0 && !entry.file_type().is_dir() {
            return Err(TaskError::io(folder, std::io::ErrorKind::NotADirectory.into()));
        }
        if let Ok(name) = entry.path().strip_prefix(folder)
            && entry.file_type().is_file()
        {
            names.push(name.to_string_lossy().replace('\\', "/"));
        }
    }
    Ok(names)
}
