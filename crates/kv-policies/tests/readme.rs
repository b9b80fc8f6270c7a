//! The documents name every policy of the registry.

use kv_policies::POLICIES;

#[test]
fn every_policy_is_documented() {
    for (file, text) in [
        ("README.md", include_str!("../../../README.md")),
        ("docs/policies.md", include_str!("../../../docs/policies.md")),
    ] {
        for entry in POLICIES {
            assert!(text.contains(&format!("`{}`", entry.name)), "{file}: `{}`", entry.name);
            assert!(text.contains(entry.paper), "{file}: {} of `{}`", entry.paper, entry.name);
        }
    }
}
