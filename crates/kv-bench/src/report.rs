pub(crate) mod format;
pub(crate) mod layouts;
#[cfg(test)]
pub(crate) mod sample;
