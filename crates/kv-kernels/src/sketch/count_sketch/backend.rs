//! The backend trait of the ops on count-sketches, and its implementations for CubeCL devices and
//! the CPU.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, DType, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::{InsertArgs, SketchTensors};

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait CountSketchOps: Backend {
    /// Adds tokens to sketches, in place. Returns the sketches' keys and values.
    fn sketch_insert(
        #[extension_type] args: InsertArgs<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Estimates keys and values `[P, M, D]` of tokens `[P, M]`.
    fn sketch_query(
        #[extension_type] sketch: SketchTensors<Self>,
        tokens: IntTensor<Self>,
        dtype: DType,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

#[cfg(feature = "gpu")]
impl CountSketchOps for CubeBackend {
    fn sketch_insert(args: InsertArgs<Self>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        super::launch::insert(args)
    }

    fn sketch_query(
        sketch: SketchTensors<Self>,
        tokens: IntTensor<Self>,
        dtype: DType,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        super::launch::query(sketch, tokens, dtype)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{DType, Flex, Shape};
    use burn_flex::FlexTensor;

    use super::CountSketchOps;
    use crate::backend::host_buffers::{dims, owned, rounded, slice, slice_mut, wide};
    use crate::sketch::count_sketch::args::{InsertArgs, SketchTensors};
    use crate::sketch::count_sketch::reference::HostSketch;

    impl CountSketchOps for Flex {
        fn sketch_insert(args: InsertArgs<Self>) -> (FlexTensor, FlexTensor) {
            let InsertArgs { sketch, tokens, keys, values, sign } = args;
            let tables = sketch.tables();
            let host = sketch.on_host(&tables);
            let [_, count] = dims(&tokens);
            let tokens = tokens.to_contiguous();
            let (keys, values) = (wide(&keys), wide(&values));
            let (mut to_keys, mut to_values) = (owned(sketch.keys), owned(sketch.values));
            // Tokens are summed first, and each sum is added to its entry at once, which rounds the
            // entry once.
            let [mut key_sums, mut value_sums] = [&to_keys, &to_values]
                .map(|entries| vec![0.0f32; entries.layout().shape().num_elements()]);
            for (at, token) in slice::<i32>(&tokens).iter().enumerate() {
                let range = at / count;
                let Some(token) = host.sketched(range, *token) else { continue };
                let row = at * host.head_dim..(at + 1) * host.head_dim;
                host.add(
                    [&mut key_sums, &mut value_sums],
                    [range, token],
                    [&keys[row.clone()], &values[row]],
                    sign,
                );
            }
            for (entries, sums) in [(&mut to_keys, key_sums), (&mut to_values, value_sums)] {
                slice_mut::<f32>(entries)
                    .iter_mut()
                    .zip(sums)
                    .for_each(|(entry, sum)| *entry += sum);
            }
            (to_keys, to_values)
        }

        fn sketch_query(
            sketch: SketchTensors<Self>,
            tokens: FlexTensor,
            dtype: DType,
        ) -> (FlexTensor, FlexTensor) {
            let tables = sketch.tables();
            let host = sketch.on_host(&tables);
            let entries = [&sketch.keys, &sketch.values].map(wide);
            let [ranges, count] = dims(&tokens);
            let tokens = tokens.to_contiguous();
            let mut found = [Vec::new(), Vec::new()];
            for (at, token) in slice::<i32>(&tokens).iter().enumerate() {
                let range = at / count;
                let rows = match host.sketched(range, *token) {
                    Some(token) => host.query([&entries[0], &entries[1]], range, token),
                    None => [vec![0.0; host.head_dim], vec![0.0; host.head_dim]],
                };
                found.iter_mut().zip(rows).for_each(|(found, row)| found.extend(row));
            }
            let [keys, values] =
                found.map(|rows| rounded(rows, Shape::from([ranges, count, host.head_dim]), dtype));
            (keys, values)
        }
    }

    impl SketchTensors<Flex> {
        /// Heads and hashes without gaps.
        pub(crate) fn tables(&self) -> [FlexTensor; 2] {
            [&self.heads, &self.hashes].map(FlexTensor::to_contiguous)
        }

        /// The sketch on the host. `tables` holds its heads and hashes.
        pub(crate) fn on_host<'a>(&self, tables: &'a [FlexTensor; 2]) -> HostSketch<'a> {
            HostSketch {
                heads: slice(&tables[0]),
                hashes: slice(&tables[1]),
                config: self.config,
                head_dim: dims::<2>(&self.keys)[1],
            }
        }
    }
}
