//! KVReviver's tables and figures.

pub(crate) mod attention;
pub(crate) mod bounds;
mod bulk;
pub(super) mod quality;
pub(super) mod table1;
#[cfg(test)]
mod tests;
