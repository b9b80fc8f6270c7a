//! Families of policies, by their treatment of slots, as tables name them.

use kv_policies::{Treatment, entry};

/// All families.
pub(crate) const FAMILIES: [Treatment; 6] = [
    Treatment::Drop,
    Treatment::Overwrite,
    Treatment::Sample,
    Treatment::Merge,
    Treatment::Summarise,
    Treatment::Read,
];

/// A family's name.
pub(crate) fn name(family: Treatment) -> &'static str {
    match family {
        Treatment::Drop => "drop",
        Treatment::Overwrite => "overwrite",
        Treatment::Sample => "sample",
        Treatment::Merge => "merge",
        Treatment::Summarise => "summarise",
        Treatment::Read => "read",
    }
}

/// The treatment of slots, as text behind a family's name.
pub(crate) fn does(family: Treatment) -> &'static str {
    match family {
        Treatment::Drop => "removes tokens",
        Treatment::Overwrite => "writes each new token over an old one",
        Treatment::Sample => "removes tokens and gives the others larger weights",
        Treatment::Merge => "joins tokens into one",
        Treatment::Summarise => "moves tokens into a smaller summary",
        Treatment::Read => "keeps all tokens and attends to some of them",
    }
}

/// The family of the policy that a label of records begins with; `None` for combinations and
/// yardsticks.
pub(crate) fn of_label(label: &str) -> Option<Treatment> {
    if label.contains(" + ") {
        return None;
    }
    entry(first_policy(label))?.treatment
}

/// Whether a policy leaves prompts to its evictor: CaM without `candidates` merges only what decode
/// steps evict, so that behind a prompt it answers as its evictor does.
pub(crate) fn spares_prompts(label: &str) -> bool {
    first_policy(label) == "cam"
        && (!label.contains("candidates=") || label.contains("candidates=0"))
}

/// The name of the policy that a label of records begins with.
pub(crate) fn first_policy(label: &str) -> &str {
    label.split([' ', '(']).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use kv_policies::POLICIES;

    use super::*;

    #[test]
    fn every_method_has_a_family_and_every_family_a_method() {
        let yardsticks = ["full", "random", "top-k-oracle", "combine"];
        for entry in POLICIES {
            let has = entry.treatment.is_some();
            assert_eq!(has, !yardsticks.contains(&entry.name), "{}", entry.name);
        }
        for family in FAMILIES {
            assert!(POLICIES.iter().any(|entry| entry.treatment == Some(family)));
        }
    }

    #[test]
    fn labels_have_the_family_of_their_policy() {
        assert_eq!(of_label("keepkv(h2o interval=8) period=4"), Some(Treatment::Merge));
        assert_eq!(of_label("cis block=8"), Some(Treatment::Read));
        assert_eq!(of_label("snapkv + h2o"), None);
        assert_eq!(of_label("full · other"), None);
        assert!(spares_prompts("cam(h2o) spread=8") && spares_prompts("cam candidates=0"));
        assert!(!spares_prompts("cam candidates=all") && !spares_prompts("keepkv(h2o)"));
    }
}
