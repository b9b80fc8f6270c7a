//! Papers' tables and figures at their settings.

pub(crate) mod balancekv_end_to_end;
pub(crate) mod balancekv_fig1;
pub(crate) mod balancekv_fig3;
pub(crate) mod balancekv_stream;
mod layer;
pub(crate) mod longflow_fig1;
pub(crate) mod longflow_fig4;

const SUITE: &str = "paper";
