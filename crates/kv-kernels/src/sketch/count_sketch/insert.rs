//! The kernel that adds tokens to sketches, with one cube an entry: the cube looks through all
//! tokens of its range for those of its entry. So no two cubes write one entry, and sums have a
//! fixed order.

use cubecl::prelude::*;

use super::hash::kernel::{hash_of, sign_of};
use super::kernel_args::{Sketch, TokenRows};
use super::{HEAD_FIELDS, SketchConfig};

/// Units of a cube. The cube looks at as many tokens at a time.
pub(crate) const UNITS: usize = 128;

/// Adds `sign` times the tokens. A range has at most `most` entries. Rows have `columns` vectors of
/// 4.
#[cube(launch_unchecked)]
pub(crate) fn insert_kernel<F: Float>(
    sketch: &mut Sketch,
    added: &TokenRows<F>,
    sign: f32,
    most: usize,
    columns: usize,
    #[comptime] config: SketchConfig,
    #[define(F)] _dtype: ElemType,
) {
    let cube = CUBE_POS;
    let count = added.count;
    if cube >= added.ranges * most {
        terminate!();
    }
    let range = cube / most;
    let entry = cube % most;
    let first = sketch.heads[range * HEAD_FIELDS] as usize;
    let entries = sketch.heads[range * HEAD_FIELDS + 1] as usize;
    if entry >= entries * config.buckets {
        terminate!();
    }
    let bucket = entry / entries;
    let within = (entry % entries) as u32;
    let unit = UNIT_POS as usize;
    // The first units take keys, the later ones values.
    let is_key = unit < columns;
    let column = select(is_key, unit, unit - columns);
    let mine = unit < 2usize * columns;
    let at = (first + entry) * columns + column;

    // A token's sign, or 0 where the token belongs to another entry.
    let mut signs = Shared::<[f32]>::new_slice(UNITS);
    // The sum is added to the entry at once, which rounds the entry once.
    let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
    let chunks = count.div_ceil(UNITS);
    for chunk in 0..chunks {
        let own = chunk * UNITS + unit;
        let mut found = 0.0f32;
        if own < count {
            let token = added.tokens[range * count + own];
            if token >= 0i32 {
                let (token, entries) = (token as u32, entries as u32);
                let place = hash_of(&sketch.hashes, range, bucket, token, entries, config);
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
                        let key = Vector::<f32, Const<4>>::cast_from(added.keys[row]);
                        sum += key * Vector::new(factor * sign);
                    } else {
                        let value = Vector::<f32, Const<4>>::cast_from(added.values[row]);
                        sum += value * Vector::new(factor * sign);
                    }
                }
            }
        }
        sync_cube();
    }
    if mine {
        if is_key {
            sketch.keys[at] += sum;
        } else {
            sketch.values[at] += sum;
        }
    }
}
