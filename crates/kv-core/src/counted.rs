//! Counts in messages.

/// A count with its noun: `1 slot`, `2 slots`.
pub fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn one_has_no_plural() {
        let all = [0, 1, 2].map(|count| counted(count, "slot"));
        assert_eq!(all, ["0 slots", "1 slot", "2 slots"]);
    }
}
