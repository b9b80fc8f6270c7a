//! Launches `top_slots` on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::args::{TopSlotsArgs, WantedScores};
use super::kernel::{ChosenSlotsLaunch, Rule, WantedRowsLaunch, top_slots_kernel};
use crate::backend::client::{empty_like, grid, planes_of, vector_lanes, widest_cube};
use crate::components::top_k::{Amounts, Search};

/// Vectors that a unit reads of a row, where the cube may have as many units.
const VECTORS_EACH: usize = 2;
/// The fewest units of a cube, whole planes on all devices.
const FEWEST_UNITS: usize = 128;

/// Returns chosen indices, and the number of each row's indices.
pub(super) fn run(args: TopSlotsArgs<CubeBackend>) -> (CubeTensor, CubeTensor) {
    let TopSlotsArgs { scores, lengths, wanted, most } = args;
    let (scores, lengths) = (into_contiguous(scores), into_contiguous(lengths));
    // The kernel reads counts or bounds, and lengths stand in for the others.
    let (counts, bounds, rule) = match wanted {
        WantedScores::Top(counts) => (into_contiguous(counts), lengths.clone(), Rule::Top),
        WantedScores::Above(bounds) => (lengths.clone(), into_contiguous(bounds), Rule::Above),
    };
    let [rows, columns] = scores.shape().dims();
    let client = scores.client.clone();
    let indices = empty_like(&scores, Shape::from([rows, most]), DType::I32);
    let found = empty_like(&scores, Shape::from([rows]), DType::I32);
    let lanes = vector_lanes(&scores, columns, columns);
    // In short rows fewer units wait for each other.
    let (widest, _) = widest_cube(&client);
    let wanted = (columns / lanes).div_ceil(VECTORS_EACH).next_power_of_two();
    let units = widest.min(wanted.max(FEWEST_UNITS));
    let planes = planes_of(&client, units);
    let amounts = Amounts::ones(&client, (columns / lanes).div_ceil(units) * lanes);
    // SAFETY: shapes were checked, and the kernel guards its accesses.
    unsafe {
        top_slots_kernel::launch_unchecked(
            &client,
            grid(rows),
            CubeDim::new_1d(units as u32),
            lanes,
            WantedRowsLaunch::new(
                scores.into_buffer_arg(),
                lengths.into_buffer_arg(),
                counts.into_buffer_arg(),
                bounds.into_buffer_arg(),
                rows,
                columns / lanes,
            ),
            ChosenSlotsLaunch::new(
                indices.clone().into_buffer_arg(),
                found.clone().into_buffer_arg(),
                most,
            ),
            rule,
            Search { units, planes, amounts },
        );
    }
    (indices, found)
}
