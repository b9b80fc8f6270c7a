//! The documents name every policy of the registry.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use kv_policies::POLICIES;
use kv_testing::skip;

/// The file in `docs/policies` that documents a policy: its own, or its relative's.
fn page_of(name: &str) -> String {
    let page = match name {
        "balancekv-augmented" => "balancekv",
        "cis-star" => "cis",
        name => name,
    };
    format!("{page}.md")
}

fn assert_names(file: &str, text: &str, name: &str, paper: &str) {
    assert!(text.contains(&format!("`{name}`")), "{file}: `{name}`");
    assert!(text.contains(paper), "{file}: {paper} of `{name}`");
}

#[test]
fn every_policy_is_documented() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    if !workspace.join("docs/policies").is_dir() {
        return skip("every_policy_is_documented", "the sources are not here");
    }
    let read = |file: &str| {
        fs::read_to_string(workspace.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
    };
    let readme = include_str!("../../../README.md");
    let index = read("docs/policies/README.md");
    for entry in POLICIES {
        let page = page_of(entry.name);
        let file = format!("docs/policies/{page}");
        assert_names("docs/policies/README.md", &index, entry.name, entry.paper);
        assert_names(&file, &read(&file), entry.name, entry.paper);
        for (file, text, folder) in
            [("README.md", readme, "docs/policies/"), ("docs/policies/README.md", &index, "")]
        {
            let link = format!("[`{}`]({folder}{page})", entry.name);
            assert!(text.contains(&link), "{file}: {link}");
        }
    }
}

#[test]
fn every_page_documents_a_policy() {
    let others = ["README.md", "reading-a-part.md"].map(String::from);
    let expected: BTreeSet<_> =
        POLICIES.iter().map(|entry| page_of(entry.name)).chain(others).collect();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/policies");
    if !folder.is_dir() {
        return skip("every_page_documents_a_policy", "the sources are not here");
    }
    let pages: BTreeSet<_> = fs::read_dir(folder)
        .unwrap()
        .map(|page| page.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(pages, expected);
}
