//! The backend trait of `top_slots`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::TopSlotsArgs;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait TopSlotsOps: Backend {
    /// The ascending indices of each row's chosen scores, `[R, most]`, with `-1` after the last,
    /// and their number, `[R]`.
    fn top_slots(#[extension_type] args: TopSlotsArgs<Self>) -> (IntTensor<Self>, IntTensor<Self>);
}

#[cfg(feature = "gpu")]
impl TopSlotsOps for CubeBackend {
    fn top_slots(args: TopSlotsArgs<Self>) -> (IntTensor<Self>, IntTensor<Self>) {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;

    use super::TopSlotsOps;
    use crate::backend::host_buffers::{slice, wide};
    use crate::components::sentinels::NO_SLOT;
    use crate::select::top_slots::args::{TopSlotsArgs, WantedScores};
    use crate::select::top_slots::reference::{above, top};

    impl TopSlotsOps for Flex {
        fn top_slots(args: TopSlotsArgs<Self>) -> (FlexTensor, FlexTensor) {
            let TopSlotsArgs { scores, lengths, wanted, most } = args;
            let [rows, columns] = scores.layout().shape().dims();
            let (scores, lengths) = (wide(&scores), lengths.to_contiguous());
            let lengths = slice::<i32>(&lengths);
            let wanted: WantedScores<Self> = match wanted {
                WantedScores::Top(counts) => WantedScores::Top(counts.to_contiguous()),
                WantedScores::Above(bounds) => WantedScores::Above(bounds.to_contiguous()),
            };
            let (mut indices, mut found) = (Vec::with_capacity(rows * most), Vec::new());
            for (row, scores) in scores.chunks_exact(columns).enumerate() {
                let scores = &scores[..lengths[row] as usize];
                let chosen = match &wanted {
                    WantedScores::Above(bounds) => above(scores, slice::<f32>(bounds)[row]),
                    WantedScores::Top(counts) => {
                        top(scores, (slice::<i32>(counts)[row] as usize).min(most))
                    }
                };
                let count = chosen.len().min(most);
                indices.extend(&chosen[..count]);
                indices.resize((row + 1) * most, NO_SLOT);
                found.push(count as i32);
            }
            (
                FlexTensor::from_data(TensorData::new(indices, [rows, most])),
                FlexTensor::from_data(TensorData::new(found, [rows])),
            )
        }
    }
}
