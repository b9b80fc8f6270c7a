//! The order of a head's rows.
//!
//! RoPE rotates pairs of rows of the query and key projections. Hugging Face pairs row `i` of a
//! head with row `i + D/2`; GGUF pairs row `2 i` with row `2 i + 1`. So row `2 i + h` of a head in
//! the file is row `h D/2 + i` here.

/// Puts the rows of `heads` heads back into Hugging Face's order.
///
/// # Shapes
/// `weights`: `[heads D, width]`, with an even `D`.
pub(crate) fn unpermute(weights: &[f32], heads: usize, width: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(weights.len());
    for head in weights.chunks_exact(weights.len() / heads) {
        for half in 0..2 {
            for pair in head.chunks_exact(2 * width) {
                out.extend_from_slice(&pair[half * width..][..width]);
            }
        }
    }
    out
}
