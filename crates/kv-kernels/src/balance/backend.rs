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
    use crate::balance::args::{BalanceArgs, CentreArgs, Classes, DrawArgs};
    use crate::balance::reference::{HostCentre, HostDraws, Lists};

    impl BalanceOps for Flex {
        fn balance(walk: BalanceArgs<Self>) -> Classes<Self> {
            let [_, head_dim] = walk.keys.layout().shape().dims();
            let [rows, _] = walk.lists.layout().shape().dims();
            let [keys, log_gamma] = [walk.keys, walk.log_gamma].map(|tensor| wide(&tensor));
            let [values, weights] =
                [walk.values, walk.weights].map(|tensor| tensor.as_ref().map(wide));
            let [lists, counts] = [walk.lists, walk.counts].map(|tensor| tensor.to_contiguous());
            let (means, seeds, numbers);
            let classes = Lists {
                keys: &keys,
                values: values.as_deref(),
                lists: slice::<i32>(&lists),
                counts: slice::<i32>(&counts),
                log_gamma: &log_gamma,
                centre: match walk.centre {
                    CentreArgs::None => HostCentre::None,
                    CentreArgs::List => HostCentre::List,
                    CentreArgs::Block(own) => {
                        means = wide(&own);
                        HostCentre::Block(&means)
                    }
                },
                weights: weights.as_deref(),
                draws: match walk.draws {
                    DrawArgs::Seeds(own) => {
                        seeds = own.to_contiguous();
                        HostDraws::Seeds(slice(&seeds))
                    }
                    DrawArgs::Numbers(own) => {
                        numbers = wide(&own);
                        HostDraws::Numbers(&numbers)
                    }
                },
                head_dim,
                config: walk.config,
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
