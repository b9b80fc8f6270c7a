//! What tests of figures share.

use crate::record::Record;
use crate::testing::ran;

/// The records and the report of a figure's quick form, on the CPU.
pub(super) fn quick(figure: &str) -> (Vec<Record>, String) {
    ran(&["paper", figure, "--quick"]).unwrap()
}
