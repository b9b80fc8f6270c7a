//! The documents' tables of kernels and strategies are those of the code.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kv_testing::skip;

/// Every kernel that is launched, as `folder/file.rs::name`.
fn launched(source: &Path, folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            launched(source, &path, found);
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let file = path.strip_prefix(source).unwrap().to_string_lossy().replace('\\', "/");
        let mut is_launched = false;
        for line in text.lines() {
            // An attribute may go over several lines; the next function is the kernel.
            is_launched |= line.trim_start().starts_with("#[cube(launch")
                || line.trim_start().starts_with("launch_unchecked,");
            let name = line.split("fn ").nth(1).and_then(|rest| rest.split(['<', '(']).next());
            if let (true, Some(name)) = (is_launched, name) {
                found.insert(format!("{file}::{name}"));
                is_launched = false;
            }
        }
    }
}

#[test]
fn the_page_of_kernels_lists_every_kernel() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let (source, page) = (root.join("src"), root.join("../../docs/kernels.md"));
    if !page.is_file() {
        return skip("the_page_of_kernels_lists_every_kernel", "the sources are not here");
    }
    let mut found = BTreeSet::new();
    launched(&source, &source, &mut found);
    let text = std::fs::read_to_string(page).unwrap();
    let listed: BTreeSet<String> =
        text.split('`').filter(|code| code.contains(".rs::")).map(String::from).collect();
    assert!(found.len() > 50, "{} kernels found", found.len());
    let missing: Vec<_> = found.difference(&listed).collect();
    let gone: Vec<_> = listed.difference(&found).collect();
    assert!(missing.is_empty() && gone.is_empty(), "not listed: {missing:?}, gone: {gone:?}");
}

/// Every strategy of a file, as `Enum::Variant`.
fn strategies(folder: &Path, found: &mut BTreeSet<(String, String)>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            strategies(&path, found);
            continue;
        }
        if !path.ends_with("strategy.rs") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let Some((_, body)) = text.split_once("pub enum ") else { continue };
        let (name, body) = body.split_once(" {").unwrap();
        let (variants, _) = body.split_once("\n}").unwrap();
        let variants = variants.lines().filter_map(|line| line.trim().strip_suffix(','));
        let variants = variants.filter(|line| line.chars().all(char::is_alphanumeric));
        found.extend(variants.map(|variant| (name.to_string(), variant.to_string())));
    }
}

#[test]
fn the_page_of_kernels_lists_every_strategy() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let (source, page) = (root.join("src"), root.join("../../docs/kernels.md"));
    if !page.is_file() {
        return skip("the_page_of_kernels_lists_every_strategy", "the sources are not here");
    }
    let mut found = BTreeSet::new();
    strategies(&source, &mut found);
    let enums: BTreeSet<_> = found.iter().map(|(name, _)| name).collect();
    let text = std::fs::read_to_string(page).unwrap();
    let (_, section) = text.split_once("## Forcing a kernel").unwrap();
    assert_eq!(section.matches("::strategy`").count(), enums.len(), "a row for each of {enums:?}");
    let rows = || section.lines().filter(|line| line.contains("::strategy`"));
    for name in enums {
        // `Auto` is explained once, before the table.
        let own: Vec<_> =
            found.iter().filter(|(own, variant)| own == name && variant != "Auto").collect();
        let lists = |row: &&str| own.iter().all(|(_, own)| row.contains(&format!("`{own}`")));
        assert!(rows().any(|row| lists(&row)), "no row has all of {own:?}");
    }
}
