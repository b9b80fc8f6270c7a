//! The kernel that adds tokens: a cube an entry, which looks for its tokens among all.

use cubecl::prelude::*;

use super::hash::kernel::{hash_of, sign_of};
use super::{HEAD_FIELDS, SketchConfig};

/// Units of a cube, which look at as many tokens at a time.
pub(crate) const UNITS: usize = 128;

/// # Shapes
/// In vectors of 4: `sketch_keys`, `sketch_values` `[N, columns]`, `keys`, `values` `[P, count,
/// columns]`; `tokens` `[P, count]`, `heads` `[P, 6]`. `most` entries of a range at most.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn insert_kernel<F: Float>(
    sketch_keys: &mut [Vector<f32, Const<4>>],
    sketch_values: &mut [Vector<f32, Const<4>>],
    heads: &[i32],
    hashes: &[i32],
    tokens: &[i32],
    keys: &[Vector<F, Const<4>>],
    values: &[Vector<F, Const<4>>],
    sign: f32,
    ranges: usize,
    count: usize,
    most: usize,
    columns: usize,
    #[comptime] config: SketchConfig,
    #[define(F)] _dtype: ElemType,
) {
    let cube = CUBE_POS;
    if cube >= ranges * most {
        terminate!();
    }
    let range = cube / most;
    let entry = cube % most;
    let first = heads[range * HEAD_FIELDS] as usize;
    let entries = heads[range * HEAD_FIELDS + 1] as usize;
    if entry >= entries * config.buckets {
        terminate!();
    }
    let bucket = entry / entries;
    let within = (entry % entries) as u32;
    let unit = UNIT_POS as usize;
    // Keys before values.
    let is_key = unit < columns;
    let column = select(is_key, unit, unit - columns);
    let mine = unit < 2usize * columns;
    let at = (first + entry) * columns + column;

    // 0 for tokens that go elsewhere, else their sign.
    let mut signs = Shared::<[f32]>::new_slice(UNITS);
    // Added to the entry at once, which rounds it once.
    let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
    let chunks = count.div_ceil(UNITS);
    for chunk in 0..chunks {
        let own = chunk * UNITS + unit;
        let mut found = 0.0f32;
        if own < count {
            let token = tokens[range * count + own];
            if token >= 0i32 {
                let place = hash_of(hashes, range, bucket, token as u32, entries as u32, config);
                if place / 2u32 == within {
                    found = sign_of(place);
                }
            }
        }
        signs[unit] = found;
        sync_cube();
        let here = min(count - chunk * UNITS, UNITS);
        if mine {
            for i in 0..here {
                let mut factor = signs[i];
                if factor != 0.0f32 {
                    let row = (range * count + chunk * UNITS + i) * columns + column;
                    if is_key {
                        if comptime!(!config.signed_keys) {
                            factor = 1.0f32;
                        }
                        let key = Vector::<f32, Const<4>>::cast_from(keys[row]);
                        sum += key * Vector::new(factor * sign);
                    } else {
                        let value = Vector::<f32, Const<4>>::cast_from(values[row]);
                        sum += value * Vector::new(factor * sign);
                    }
                }
            }
        }
        sync_cube();
    }
    if mine {
        if is_key {
            sketch_keys[at] += sum;
        } else {
            sketch_values[at] += sum;
        }
    }
}
