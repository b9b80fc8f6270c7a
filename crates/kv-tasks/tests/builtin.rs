//! The built-in tasks.

use std::collections::BTreeSet;
use std::path::Path;

use kv_tasks::Task;

/// The names that the files of a folder give their tasks.
fn files(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files(&path, names);
            continue;
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tasks");
        let name = path.strip_prefix(root).expect("a file of a task").with_extension("");
        names.insert(name.to_string_lossy().into_owned());
    }
}

#[test]
fn every_file_is_a_task_of_its_name() {
    let mut expected = BTreeSet::new();
    files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tasks"), &mut expected);
    let names: BTreeSet<_> = Task::names().map(str::to_owned).collect();
    assert_eq!(names, expected);
    for name in names {
        let task = Task::named(&name).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(task.name, name);
        assert!(!task.about.is_empty() && !task.family.is_empty());
        let readme = include_str!("../README.md");
        let row = format!("| `{}` | {} |", task.grader, task.max_new_tokens);
        let listed =
            |line: &str| line.starts_with(&format!("| `{name}` |")) && line.ends_with(&row);
        assert!(readme.lines().any(listed), "the README has no right row of {name}");
    }
}
