//! Records of other runs beside this one's.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::record::{Case, Record, read_json};

/// The records of a file, and the file's name, which tells them apart from other records.
#[derive(Debug)]
pub(crate) struct RecordFile {
    name: String,
    records: Vec<Record>,
}

impl RecordFile {
    /// Reads files of records. Each file is named by its stem, or by its path where two stems are
    /// equal.
    ///
    /// # Errors
    /// If a file cannot be read or does not hold records.
    pub(crate) fn read_all(paths: &[PathBuf]) -> anyhow::Result<Vec<Self>> {
        let stem = |path: &Path| {
            // Of `records.json.partial` too.
            let partial = path.extension().is_some_and(|extension| extension == "partial");
            let path = if partial { path.with_extension("") } else { path.into() };
            path.file_stem().map(|stem| stem.to_string_lossy().into_owned())
        };
        let read = |path: &PathBuf| {
            let alike = paths.iter().filter(|other| stem(other) == stem(path)).count();
            let name = stem(path).filter(|_| alike == 1);
            let name = name.unwrap_or_else(|| path.display().to_string());
            Ok(Self { name, records: read_json(path)? })
        };
        paths.iter().map(read).collect()
    }
}

/// All records. Records of one case from several sources are not averaged: where this run or
/// another file holds a case of a file, too, the file's name follows the policy's name in the
/// file's record.
pub(crate) fn merge(own: Vec<Record>, others: Vec<RecordFile>) -> Vec<Record> {
    let mut holders: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
    let lists = std::iter::once(&own).chain(others.iter().map(|source| &source.records));
    for (index, records) in lists.enumerate() {
        for record in records {
            holders.entry(measurement(record)).or_default().insert(index);
        }
    }
    let mut all = own;
    for mut source in others {
        let shared: BTreeSet<String> = source
            .records
            .iter()
            .filter(|record| holders[&measurement(record)].len() > 1)
            .map(setup)
            .collect();
        for record in &mut source.records {
            if shared.contains(&setup(record)) {
                record.policy = format!("{} · {}", record.policy, source.name);
            }
        }
        all.append(&mut source.records);
    }
    all
}

/// The run that a record is of, whatever its metric.
fn setup(record: &Record) -> String {
    let Record { suite, model, device, policy, budget, .. } = record;
    format!("{:?}", (suite, model, device, policy, budget))
}

/// The metric and case of a record, whatever the prompts.
fn measurement(record: &Record) -> String {
    let case = Case { source: None, prompt: None, samples: None, ..record.case.clone() };
    format!("{} {:?}", setup(record), (&record.metric, case))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{metric, write_json};
    use crate::report::test_records::record;

    #[test]
    fn a_case_of_two_sources_is_kept_apart() {
        let folder = tempfile::tempdir().unwrap();
        let speed = |policy: &str, length, value| {
            let mut record = record(policy, Some(0.5), metric::DECODE_TOKENS_PER_SECOND, value);
            record.case.length = Some(length);
            record
        };
        let files = [
            ("one/before.json", vec![speed("a", 1000, 1.0), speed("a", 2000, 2.0)]),
            ("one/peer.json", vec![speed("b", 1000, 3.0), speed("c", 2000, 4.0)]),
            ("two/peer.json", vec![speed("b", 1000, 5.0)]),
        ];
        let paths: Vec<_> = files.iter().map(|(name, _)| folder.path().join(name)).collect();
        for (path, (_, records)) in paths.iter().zip(&files) {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            write_json(path, records).unwrap();
        }
        let own = vec![speed("a", 1000, 6.0), speed("c", 1000, 7.0)];
        let all = merge(own, RecordFile::read_all(&paths).unwrap());
        let policies: Vec<_> = all.iter().map(|record| record.policy.clone()).collect();
        let peer = |index: usize| format!("b · {}", paths[index].display());
        // Two lengths of `c` are two cases.
        let expected = ["a", "c", "a · before", "a · before", &peer(1), "c", &peer(2)];
        assert_eq!(policies, expected);
        let missing = RecordFile::read_all(&[folder.path().join("none.json")]).unwrap_err();
        assert!(format!("{missing:#}").contains("none.json"));
    }
}
