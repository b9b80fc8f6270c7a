//! Every kernel of an op over the op's cases, whichever would be chosen.

use std::fmt::Debug;

use kv_kernels::KernelError;
use kv_testing::{TestDevice, lacks};

/// Runs each case by each strategy that serves it, and tells which strategies served none.
pub(crate) fn force<S: Copy + Debug, C>(
    test: &str,
    tested: &TestDevice,
    strategies: &[S],
    cases: &[C],
    mut run: impl FnMut(S, &C) -> Result<(), KernelError>,
) {
    for &strategy in strategies {
        let (mut served, mut why) = (false, String::new());
        for case in cases {
            match run(strategy, case) {
                Ok(()) => served = true,
                Err(error @ KernelError::Unavailable { .. }) => why = error.to_string(),
                Err(error) => panic!("{test}: {} {strategy:?}: {error}", tested.name),
            }
        }
        if !served {
            lacks(&format!("{test} on {} by {strategy:?}", tested.name), &why);
        }
    }
}
