//! The kernel that estimates tokens, and the median that all readers of sketches share.

use cubecl::prelude::*;

use super::hash::kernel::{hash_of, sign_of};
use super::kernel_args::{Sketch, TokenRows};
use super::{HEAD_FIELDS, SketchConfig};

/// The elementwise median of `count` vectors, which are reordered.
#[cube]
pub(crate) fn median<F: Float, N: Size>(
    parts: &mut Array<Vector<F, N>>,
    #[comptime] count: usize,
) -> Vector<F, N> {
    if comptime!(count == 3) {
        let (low, high) = (parts[0].min(parts[1]), parts[0].max(parts[1]));
        low.max(high.min(parts[2]))
    } else {
        // A bubble sort: there are few vectors, and all elements are sorted at once.
        #[unroll]
        for round in 1..count {
            #[unroll]
            for i in 0..comptime!(count - round) {
                let (low, high) = (parts[i].min(parts[i + 1]), parts[i].max(parts[i + 1]));
                parts[i] = low;
                parts[i + 1] = high;
            }
        }
        let middle = parts[comptime!(count / 2)];
        if comptime!(count.is_multiple_of(2)) {
            (middle + parts[comptime!(count / 2 - 1)]) * Vector::new(F::new(0.5))
        } else {
            middle
        }
    }
}

/// Writes the estimated keys and values of tokens. Each unit has one vector of 4 out of the
/// `columns` of a token.
#[cube(launch_unchecked)]
pub(crate) fn query_kernel<F: Float>(
    sketch: &Sketch,
    asked: &mut TokenRows<F>,
    columns: usize,
    #[comptime] config: SketchConfig,
    #[define(F)] _dtype: ElemType,
) {
    let buckets = config.buckets.comptime();
    let at = ABSOLUTE_POS;
    let count = asked.count;
    if at >= asked.ranges * count * columns {
        terminate!();
    }
    let row = at / columns;
    let range = row / count;
    let first = sketch.heads[range * HEAD_FIELDS] as usize;
    let entries = sketch.heads[range * HEAD_FIELDS + 1] as usize;
    let token = asked.tokens[row];
    let mut key = Vector::<f32, Const<4>>::new(0.0f32);
    let mut value = Vector::<f32, Const<4>>::new(0.0f32);
    if token >= 0i32 && entries > 0 {
        let mut keys = Array::<Vector<f32, Const<4>>>::new(buckets);
        let mut values = Array::<Vector<f32, Const<4>>>::new(buckets);
        #[unroll]
        for bucket in 0..buckets {
            let place = hash_of(
                &sketch.hashes,
                range,
                bucket.runtime(),
                token as u32,
                entries as u32,
                config,
            );
            let entry = first + bucket * entries + (place / 2u32) as usize;
            let sign = Vector::new(sign_of(place));
            let from = entry * columns + at % columns;
            keys[bucket] = sketch.keys[from];
            if comptime!(config.signed_keys) {
                keys[bucket] *= sign;
            }
            values[bucket] = sketch.values[from] * sign;
        }
        key = median::<f32, Const<4>>(&mut keys, buckets);
        value = median::<f32, Const<4>>(&mut values, buckets);
    }
    asked.keys[at] = Vector::cast_from(key);
    asked.values[at] = Vector::cast_from(value);
}
