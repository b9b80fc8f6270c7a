//! Numbers of the file to f32, after ggml's `dequantize_row_*`.
//!
//! `d` and `m` are a block's scale and minimum (f16), `q` its integers:
//!
//! - Q8_0, Q4_0, Q5_0: `d q` with signed `q`; 4 and 5 bits are stored with 8 and 16 added;
//! - Q4_1, Q5_1: `d q + m`;
//! - Q4_K, Q5_K: `(d s_j) q - m t_j`, with scales `s_j` and minima `t_j` (6 bits) of the 8 groups
//!   of 32 in a block;
//! - Q6_K: `(d s_j) q` with signed `q`, stored with 32 added, and scales `s_j` (8 bits, signed) of
//!   the 16 groups of 16.
//!
//! Source: ggml, `ggml-quants.c`.

use half::{bf16, f16};

use crate::TensorType;

/// The numbers of whole blocks.
pub(crate) fn dequantize(kind: TensorType, bytes: &[u8]) -> Vec<f32> {
    let mut out = Vec::with_capacity(bytes.len() / kind.block_bytes() * kind.block_len());
    let block: fn(&[u8], &mut Vec<f32>) = match kind {
        TensorType::F32 => |b, out| out.push(f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        TensorType::F16 => |b, out| out.push(half_at(b, 0)),
        TensorType::BF16 => |b, out| out.push(bf16::from_le_bytes([b[0], b[1]]).to_f32()),
        TensorType::Q4_0 => |b, out| {
            let d = half_at(b, 0);
            out.extend(nibbles(&b[2..]).map(|q| d * (f32::from(q) - 8.0)));
        },
        TensorType::Q4_1 => |b, out| {
            let (d, m) = (half_at(b, 0), half_at(b, 2));
            out.extend(nibbles(&b[4..]).map(|q| d * f32::from(q) + m));
        },
        TensorType::Q5_0 => |b, out| {
            let d = half_at(b, 0);
            out.extend(five_bits(&b[2..6], &b[6..]).map(|q| d * (f32::from(q) - 16.0)));
        },
        TensorType::Q5_1 => |b, out| {
            let (d, m) = (half_at(b, 0), half_at(b, 2));
            out.extend(five_bits(&b[4..8], &b[8..]).map(|q| d * f32::from(q) + m));
        },
        TensorType::Q8_0 => |b, out| {
            let d = half_at(b, 0);
            out.extend(b[2..].iter().map(|q| d * f32::from(q.cast_signed())));
        },
        TensorType::Q4_K => |b, out| k_block(b, &[0; 32], &b[16..], out),
        TensorType::Q5_K => |b, out| k_block(b, &b[16..48], &b[48..], out),
        TensorType::Q6_K => q6_k,
    };
    bytes.chunks_exact(kind.block_bytes()).for_each(|bytes| block(bytes, &mut out));
    out
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// The low halves of all bytes, then the high halves.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> {
    bytes.iter().map(|b| b & 15).chain(bytes.iter().map(|b| b >> 4))
}

/// 4 bits of each number in `low`, the fifth in `high`, one bit a number.
fn five_bits(high: &[u8], low: &[u8]) -> impl Iterator<Item = u8> {
    nibbles(low).enumerate().map(|(i, q)| q | (high[i / 8] >> (i % 8) & 1) << 4)
}

/// Q4_K and Q5_K: bit `j` of byte `i` of `high` is the fifth bit of number `i` of group `j`.
fn k_block(block: &[u8], high: &[u8], low: &[u8], out: &mut Vec<f32>) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (j, low) in (0..8).zip(low.chunks_exact(32).flat_map(|low| [low, low])) {
        let (scale, min) = scale_and_min(&block[4..16], j);
        let (scale, min) = (d * f32::from(scale), m * f32::from(min));
        out.extend(low.iter().zip(high).map(|(low, high)| {
            let q = (low >> (4 * (j % 2)) & 15) | (high >> j & 1) << 4;
            scale * f32::from(q) - min
        }));
    }
}

/// Group `j`'s scale and minimum of 6 bits. The upper 2 bits of groups 4 to 7 are in the bytes of
/// groups 0 to 3.
fn scale_and_min(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        return (packed[j] & 63, packed[j + 4] & 63);
    }
    let both = packed[j + 4];
    (both & 15 | packed[j - 4] >> 6 << 4, both >> 4 | packed[j] >> 6 << 4)
}

fn q6_k(block: &[u8], out: &mut Vec<f32>) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    for i in 0..256 {
        // Halves of 128 numbers have 64 bytes of low and 32 bytes of high bits each.
        let (half, within) = (i / 128, i % 128);
        let low = low[64 * half + within % 64] >> (4 * (within / 64)) & 15;
        let high = high[32 * half + within % 32] >> (2 * (within / 32)) & 3;
        let scale = d * f32::from(scales[i / 16].cast_signed());
        out.push(scale * (f32::from(low | high << 4) - 32.0));
    }
}
