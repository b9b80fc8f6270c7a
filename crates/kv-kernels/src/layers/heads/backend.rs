//! The backend trait of the ops on heads, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::{PlacementArgs, Projection, Written};
use crate::slots::pool::SlotPools;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait HeadsOps: Backend {
    /// Splits projections into queries, keys and values `[B, H, T, D]`, of `tokens` tokens a
    /// sequence.
    fn split_heads(
        #[extension_type] projection: Projection<Self>,
        tokens: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// Writes one token of each sequence, in place.
    fn write_heads(
        #[extension_type] projection: Projection<Self>,
        #[extension_type] pools: SlotPools<Self>,
        #[extension_type] places: PlacementArgs<Self>,
    ) -> Written<Self>;
}

#[cfg(feature = "gpu")]
impl HeadsOps for CubeBackend {
    fn split_heads(
        projection: Projection<Self>,
        tokens: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        super::launch::split(projection, tokens)
    }

    fn write_heads(
        projection: Projection<Self>,
        pools: SlotPools<Self>,
        places: PlacementArgs<Self>,
    ) -> Written<Self> {
        super::launch::write(projection, pools, places)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;

    use super::HeadsOps;
    use crate::backend::host_buffers::{Wide, owned, rounded, rounding, slice, slice_mut, wide};
    use crate::backend::optional::OptionalFloat;
    use crate::layers::heads::HeadConfig;
    use crate::layers::heads::args::{PlacementArgs, Projection, Written};
    use crate::layers::heads::reference::Tokens;
    use crate::slots::norms::log_norm;
    use crate::slots::pool::SlotPools;
    use crate::slots::scatter_rows::backend::ScatterRowsOps;

    impl HeadsOps for Flex {
        fn split_heads(
            projection: Projection<Self>,
            tokens: usize,
        ) -> (FlexTensor, FlexTensor, FlexTensor) {
            let dtype = projection.projected.dtype();
            let HeadConfig { query_heads, kv_heads, head_dim, .. } = projection.config;
            let data = ProjectionData::new(&projection);
            let new = data.tokens();
            let batch = data.positions.len() / tokens;
            let part = |first: usize, count: usize| {
                rounded(new.heads(first, count, tokens), [batch, count, tokens, head_dim], dtype)
            };
            (
                part(0, query_heads),
                part(query_heads, kv_heads),
                part(query_heads + kv_heads, kv_heads),
            )
        }

        fn write_heads(
            projection: Projection<Self>,
            pools: SlotPools<Self>,
            places: PlacementArgs<Self>,
        ) -> Written<Self> {
            let dtype = projection.projected.dtype();
            let HeadConfig { query_heads, kv_heads, head_dim, .. } = projection.config;
            let data = ProjectionData::new(&projection);
            let new = data.tokens();
            let batch = data.positions.len();
            let shape = [batch, query_heads, head_dim];
            let query = rounded(new.heads(0, query_heads, 1), shape, dtype);

            let mut lengths = owned(places.lengths);
            let offsets = places.offsets.to_contiguous();
            let next = places.next.as_ref().map(FlexTensor::to_contiguous);
            let next = next.as_ref().map(slice::<i32>);
            let heads = slice::<i32>(&offsets).iter().zip(slice_mut::<i32>(&mut lengths));
            let slots = heads.enumerate().map(|(head, (&offset, length))| {
                // A token goes behind the last one, unless its place is given.
                let place = next.map_or(*length, |next| next[head]);
                *length += i32::from(place == *length);
                offset + place
            });
            let slots: Vec<i32> = slots.collect();
            let count = batch * kv_heads;
            let at = FlexTensor::from_data(TensorData::new(slots, [count]));
            let rows = |pool: FlexTensor, first: usize| {
                let rows = new.heads(first, kv_heads, 1);
                let dtype = pool.dtype();
                Self::scatter_rows(pool, at.clone(), rounded(rows, [count, head_dim], dtype))
            };
            let positions = data.positions.iter();
            let positions: Vec<i32> =
                positions.flat_map(|&position| std::iter::repeat_n(position, kv_heads)).collect();
            let positions = FlexTensor::from_data(TensorData::new(positions, [count]));
            let log_weights = pools.log_weights.map(|log_weights| {
                let ones = FlexTensor::from_data(TensorData::new(vec![0.0f32; count], [count]));
                Self::scatter_rows(log_weights, at.clone(), ones)
            });
            let log_norms = places.log_norms.map(|log_norms| {
                let values = new.heads(query_heads + kv_heads, kv_heads, 1);
                let values = wide(&rounded(values, [count, head_dim], pools.values.dtype()));
                let norms: Vec<f32> = values.chunks(head_dim).map(log_norm).collect();
                let norms = FlexTensor::from_data(TensorData::new(norms, [count]));
                Self::scatter_rows(log_norms, at.clone(), norms)
            });
            let pools = SlotPools {
                keys: rows(pools.keys, query_heads),
                values: rows(pools.values, query_heads + kv_heads),
                positions: Self::scatter_ints(pools.positions, at.clone(), positions),
                log_weights,
            };
            Written { query, pools, lengths, log_norms }
        }
    }

    /// The projections of new tokens, as f32.
    struct ProjectionData {
        projected: Wide,
        positions: Vec<i32>,
        tables: Option<[Wide; 2]>,
        norms: Option<[Wide; 2]>,
        config: HeadConfig,
        round: fn(f32) -> f32,
    }

    impl ProjectionData {
        fn new(projection: &Projection<Flex>) -> Self {
            let Projection { projected, positions, cos, sin, query_norm, key_norm, config } =
                projection;
            let positions = positions.to_contiguous();
            let both = |first: &OptionalFloat<Flex>, second: &OptionalFloat<Flex>| {
                first.as_ref().zip(second.as_ref()).map(|(first, second)| [first, second].map(wide))
            };
            Self {
                projected: wide(projected),
                positions: slice::<i32>(&positions).to_vec(),
                tables: both(cos, sin),
                norms: both(query_norm, key_norm),
                config: *config,
                round: rounding(projected.dtype()),
            }
        }

        fn tokens(&self) -> Tokens<'_> {
            let config = self.config;
            Tokens {
                projected: &self.projected,
                positions: &self.positions,
                rotation: self.tables.as_ref().map(slices),
                norms: self.norms.as_ref().map(|norms| (slices(norms), config.epsilon)),
                query_heads: config.query_heads,
                kv_heads: config.kv_heads,
                head_dim: config.head_dim,
                round: self.round,
            }
        }
    }
    fn slices(both: &[Wide; 2]) -> [&[f32]; 2] {
        both.each_ref().map(|own| &**own)
    }
}
