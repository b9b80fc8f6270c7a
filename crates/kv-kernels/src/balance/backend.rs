//! The backend trait of `balance`, and its implementations for CubeCL devices and the CPU.

use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::{BalanceArgs, Classes};

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait BalanceOps: Backend {
    /// Splits every block of every list into two classes.
    fn balance(#[extension_type] args: BalanceArgs<Self>) -> Classes<Self>;
}

#[cfg(feature = "gpu")]
impl BalanceOps for CubeBackend {
    fn balance(args: BalanceArgs<Self>) -> Classes<Self> {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;

    use super::BalanceOps;
    use crate::backend::host_buffers::{slice, wide};
    use crate::balance::args::{BalanceArgs, Classes};
    use crate::balance::reference::Lists;

    impl BalanceOps for Flex {
        fn balance(walk: BalanceArgs<Self>) -> Classes<Self> {
            let BalanceArgs { keys, values, config, .. } = walk;
            let [_, head_dim] = keys.layout().shape().dims();
            let [rows, _] = walk.lists.layout().shape().dims();
            let [keys, values, log_gamma, means, weights, numbers] =
                [keys, values, walk.log_gamma, walk.means, walk.weights, walk.numbers]
                    .map(|tensor| wide(&tensor));
            let [lists, counts, seeds] =
                [walk.lists, walk.counts, walk.seeds].map(|tensor| tensor.to_contiguous());
            let classes = Lists {
                keys: &keys,
                values: &values,
                lists: slice::<i32>(&lists),
                counts: slice::<i32>(&counts),
                log_gamma: &log_gamma,
                means: &means,
                weights: &weights,
                seeds: slice::<i32>(&seeds),
                numbers: &numbers,
                head_dim,
                config,
            }
            .balance();
            let ints = |values: Vec<i32>| {
                let width = values.len() / rows;
                FlexTensor::from_data(TensorData::new(values, [rows, width]))
            };
            Classes {
                signs: ints(classes.signs),
                kept: ints(classes.kept),
                failed: ints(classes.failed),
            }
        }
    }
}
