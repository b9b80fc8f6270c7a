//! `swiglu` in plain loops: the CPU path, and the oracle of the kernel's tests.

/// `silu(gate) * up`.
pub(crate) fn gated(gate: f32, up: f32) -> f32 {
    gate / (1.0 + (-gate).exp()) * up
}

/// Gates rows: `[N, 2 I]` to `[N, I]`.
pub(crate) fn swiglu(x: &[f32], width: usize) -> Vec<f32> {
    let rows = x.chunks_exact(2 * width);
    rows.flat_map(|row| {
        let (gates, ups) = row.split_at(width);
        gates.iter().zip(ups).map(|(gate, up)| gated(*gate, *up))
    })
    .collect()
}
