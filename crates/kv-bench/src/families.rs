//! Six families of policies, by their treatment of slots.

/// A family of policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Drop,
    Overwrite,
    Sample,
    Merge,
    Summarise,
    Read,
}

impl Family {
    /// All of them.
    pub(crate) const ALL: [Self; 6] =
        [Self::Drop, Self::Overwrite, Self::Sample, Self::Merge, Self::Summarise, Self::Read];

    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Drop => "drop",
            Self::Overwrite => "overwrite",
            Self::Sample => "sample",
            Self::Merge => "merge",
            Self::Summarise => "summarise",
            Self::Read => "read",
        }
    }

    /// The treatment of slots, as text behind its name.
    pub(crate) fn does(self) -> &'static str {
        match self {
            Self::Drop => "removes tokens",
            Self::Overwrite => "writes each new token over an old one",
            Self::Sample => "removes tokens and gives the others larger weights",
            Self::Merge => "joins tokens into one",
            Self::Summarise => "moves tokens into a smaller summary",
            Self::Read => "keeps all tokens and attends to some of them",
        }
    }

    /// The family of a policy of the registry; `None` for the full cache, for a combination of two
    /// policies, and for yardsticks that are no methods.
    pub(crate) fn of(policy: &str) -> Option<Self> {
        Some(match policy {
            "streaming-llm" | "snapkv" | "pyramidkv" | "adakv" | "h2o" | "vatp" | "tova"
            | "r-kv" | "knorm" | "keydiff" | "expected-attention" | "lagkv" | "pyramidinfer"
            | "recent-attention" | "duo-attention" => Self::Drop,
            "longflow" => Self::Overwrite,
            "balancekv" | "balancekv-augmented" | "balancekv-stream" | "uniform" => Self::Sample,
            "keepkv" | "d2o" | "cam" | "kvmerger" => Self::Merge,
            "kvreviver" => Self::Summarise,
            "cis" | "cis-star" | "cpe" | "psaw" | "etf" | "quest" | "double-sparsity"
            | "hshare" => Self::Read,
            _ => return None,
        })
    }

    /// The family of the policy that a label of records begins with.
    pub(crate) fn of_label(label: &str) -> Option<Self> {
        if label.contains(" + ") {
            return None;
        }
        Self::of(label.split([' ', '(']).next().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use kv_policies::POLICIES;

    use super::*;

    #[test]
    fn every_method_has_a_family_and_every_family_a_method() {
        let yardsticks = ["full", "random", "top-k-oracle", "combine"];
        for entry in POLICIES {
            let has = Family::of(entry.name).is_some();
            assert_eq!(has, !yardsticks.contains(&entry.name), "{}", entry.name);
        }
        for family in Family::ALL {
            assert!(POLICIES.iter().any(|entry| Family::of(entry.name) == Some(family)));
        }
    }

    #[test]
    fn labels_have_the_family_of_their_policy() {
        assert_eq!(Family::of_label("keepkv(h2o interval=8) period=4"), Some(Family::Merge));
        assert_eq!(Family::of_label("cis block=8"), Some(Family::Read));
        assert_eq!(Family::of_label("snapkv + h2o"), None);
        assert_eq!(Family::of_label("full · other"), None);
    }
}
