//! KVReviver's tables and figures.

pub(crate) mod attention;
pub(crate) mod bounds;
pub(super) mod quality;
pub(super) mod table1;
#[cfg(test)]
mod tests;
