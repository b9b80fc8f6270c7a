//! Papers' tables and figures at their settings.

pub(crate) mod longflow_fig1;
pub(crate) mod longflow_fig4;

const SUITE: &str = "paper";
