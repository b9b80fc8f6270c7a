//! The policies of a report: numbered once, so that each has one colour and mark in all figures.

use super::svg::{Ink, marker, px};
use crate::format::escape;
use crate::record::{FULL, Record, group_by};

/// The policies in the order of first sight, without the full cache.
#[derive(Clone, Debug)]
pub(crate) struct Policies(Vec<String>);

impl Policies {
    /// The policies of some records.
    pub(crate) fn of(records: &[Record]) -> Self {
        let names = group_by(records, |r| r.policy.as_str()).into_iter().map(|(name, _)| name);
        Self(names.filter(|name| *name != FULL).map(Into::into).collect())
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// A policy's number; the full cache has none.
    pub(crate) fn number(&self, policy: &str) -> Option<usize> {
        self.0.iter().position(|name| name == policy)
    }

    /// Style rules that fade all other policies while one's key is pointed at.
    pub(crate) fn hover_rules(&self) -> String {
        let rule = |i: usize| {
            format!(
                "figure:has(.key.k{i}:hover) svg .s:not(.k{i}){{opacity:.12}}\
                 figure:has(.key.k{i}:hover) svg .k{i}.line:not(.error){{stroke-width:7}}\
                 figure:has(.key.k{i}:hover) svg .s.k{i}.error{{opacity:1}}\n"
            )
        };
        (0..self.len()).map(rule).collect()
    }
}

/// One entry of a legend: the policy's line and marker beside its name.
pub(crate) fn key(policy: Option<usize>, name: &str) -> String {
    let ink = Ink::of(policy);
    let corners = marker(policy.unwrap_or(0), (px(13.0), px(7.0)), px(3.5));
    let corners: Vec<String> = corners.iter().map(|(x, y)| format!("{x},{y}")).collect();
    format!(
        r#"<li class="key {class}"><svg viewBox="0 0 52 28" width="26" height="14"
aria-hidden="true"><line class="{class} line" x1="0" y1="14" x2="52" y2="14" stroke-width="4"/>
<polygon class="{class} area" points="{}"/></svg>{}</li>"#,
        corners.join(" "),
        escape(name),
        class = ink.class(),
    )
}
