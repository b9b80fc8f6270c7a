//! What PSAW and ETF change against what they may change at most.

use kv_policies::{KeyDrift, Recency};
use kv_testing::Numbers;

fn softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
    logits.iter().map(|logit| (logit - max).exp() / sum).collect()
}

/// Attention under a geometric tail, the rest of it on a sink: theorem 7 with the tail's own
/// constants and with fitted ones, which are no worse.
#[test]
fn what_windows_drop_is_bounded() {
    let mut numbers = Numbers::new(7);
    for (lambda, kappa) in [(0.01, 0.9), (0.1, 0.5), (0.5, 0.99), (2.0, 0.3)] {
        let given = Recency { lambda, log_kappa: f64::ln(kappa) };
        let rho = f64::exp(-lambda);
        for _ in 0..20 {
            // Far from where floats lose digits.
            let length = 20 + numbers.below((300.0 / lambda) as usize).min(400);
            let mass: Vec<f64> = numbers
                .normal(length)
                .iter()
                .enumerate()
                .map(|(at, draw)| {
                    let part = f64::from(draw.abs()).min(1.0);
                    part * kappa * (1.0 - rho) * rho.powi(at as i32)
                })
                .collect();
            assert!(mass.iter().sum::<f64>() < 1.0);
            for distance in [1, 5, length / 2, length - 1, length] {
                let dropped: f64 = mass[distance.min(length)..].iter().sum();
                let fitted = Recency::fit(&mass, distance).unwrap();
                for bound in [given, fitted] {
                    assert!(dropped <= bound.dropped_mass(distance), "{bound:?} at {distance}");
                }
                let (ours, own) = (fitted.dropped_mass(distance), given.dropped_mass(distance));
                assert!(ours <= own * 1.000_001, "{fitted:?} is worse than {given:?}");
                let tail = |at: usize| {
                    let log = fitted.log_kappa - fitted.lambda * at as f64;
                    log.exp() * (1.0 - (-fitted.lambda).exp())
                };
                assert!(mass.iter().enumerate().all(|(at, mass)| *mass <= tail(at) * 1.000_001));
            }
        }
    }
}

/// As it is printed, with the mass beside the sinks in place of `kappa`, theorem 7 does not follow
/// from its assumption: mass that is all far away.
#[test]
fn the_printed_form_of_theorem_7_does_not_hold() {
    let (kappa, distance, length) = (0.9f64, 20, 200);
    let tail = Recency { lambda: 0.1, log_kappa: kappa.ln() };
    let rho = f64::exp(-0.1);
    let mass = |at: usize| kappa * (1.0 - rho) * rho.powi(at as i32);
    let dropped: f64 = (distance..length).map(mass).sum();
    let beside_sinks = dropped;
    assert!(dropped > beside_sinks * (-tail.lambda * distance as f64).exp());
    assert!(dropped <= tail.dropped_mass(distance));
}

/// Theorem 8 on random queries and keys, whose updates shrink with depth.
#[test]
fn what_frozen_keys_move_is_bounded() {
    let (dim, tokens, layers, frozen) = (8, 60, 6, 40);
    let mut numbers = Numbers::new(9);
    let mut vectors = |count: usize, size: f64| -> Vec<Vec<f64>> {
        let draws = numbers.normal(count * dim);
        draws.chunks(dim).map(|row| row.iter().map(|x| size * f64::from(*x)).collect()).collect()
    };
    let norm = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>().sqrt();
    let mut keys = vec![vectors(tokens, 1.0)];
    for depth in 0..layers {
        let updates = vectors(tokens, 0.7 * (-0.6 * depth as f64).exp());
        let next = keys[depth]
            .iter()
            .zip(&updates)
            .map(|(key, update)| key.iter().zip(update).map(|(k, u)| k + u).collect::<Vec<f64>>());
        keys.push(next.collect());
    }
    let largest: Vec<(usize, f64)> = (0..layers)
        .map(|depth| {
            let pairs = keys[depth].iter().zip(&keys[depth + 1]).take(frozen);
            let updates = pairs.map(|(below, own)| {
                norm(&own.iter().zip(below).map(|(a, b)| a - b).collect::<Vec<f64>>())
            });
            (depth, updates.fold(0.0, f64::max))
        })
        .collect();
    let drift = KeyDrift::fit(&largest).unwrap();
    assert!(drift.rate > 0.3, "{drift:?}");
    let queries = vectors(20, 1.5);
    let mut tightest = 0.0f64;
    for depth in 0..layers {
        for query in &queries {
            let logits = |reused: usize| -> Vec<f64> {
                let rows = keys[depth][..reused].iter().chain(&keys[depth + 1][reused..]);
                rows.map(|key| {
                    let dot: f64 = key.iter().zip(query).map(|(k, q)| k * q).sum();
                    dot / (dim as f64).sqrt()
                })
                .collect()
            };
            let (own, reused) = (softmax(&logits(0)), softmax(&logits(frozen)));
            let gap = own.iter().zip(&reused).map(|(a, b)| (a - b).abs()).sum::<f64>() / 2.0;
            let bound = drift.gap(norm(query), dim, depth);
            assert!(gap <= bound, "depth {depth}: {gap} above {bound}");
            tightest = tightest.max(gap / bound);
        }
    }
    assert!(tightest > 0.01, "the bound says nothing: {tightest}");
}

#[test]
fn there_is_no_fit_of_nothing() {
    assert_eq!(Recency::fit(&[0.0, 0.0], 1), None);
    assert_eq!(Recency::fit(&[], 1), None);
    assert_eq!(Recency::fit(&[0.1, f64::NAN], 1), None);
    assert_eq!(KeyDrift::fit(&[(0, 0.0)]), None);
    assert_eq!(KeyDrift::fit(&[(0, f64::INFINITY)]), None);
    // Updates that grow: no decay is claimed.
    let grown = KeyDrift::fit(&[(0, 1.0), (1, 2.0), (2, 3.0)]).unwrap();
    assert!(grown.rate < 1e-6 && grown.scale >= 3.0, "{grown:?}");
    // A single distance: anything further away is next to nothing.
    let near = Recency::fit(&[0.4], 3).unwrap();
    assert!(near.dropped_mass(3) < 1e-9 && near.dropped_mass(0) >= 0.4, "{near:?}");
}
