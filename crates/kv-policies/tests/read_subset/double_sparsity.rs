//! Double Sparsity: tokens by a few channels.

use super::*;

#[test]
fn double_sparsity_reads_the_tokens_of_an_f64_reference() {
    for tested in quick_devices("read_subset") {
        for group in [1, 2, 4] {
            let traces = traces(group, &tested.device);
            // One list a query head, and one a key-value head.
            for lists in [KV_HEADS * group, KV_HEADS] {
                let own: Vec<Vec<usize>> = (0..lists)
                    .map(|head| (0..DIM).map(|at| (at * 5 + 3 * head) % DIM).collect())
                    .collect();
                let config = json!({"policy": "double-sparsity", "budget": 20, "labels": 3,
                    "channels": [own, own, own]});
                follow(&config, &traces, DEEP, &mut |_, row, head, length| {
                    let (trace, each) = (&traces[row], KV_HEADS * group / lists);
                    let query = trace.query(head, length - 1);
                    let score = |key: &Vec<f64>| -> f64 {
                        own[head / each][..3].iter().map(|&c| query[c] * key[c]).sum()
                    };
                    let scores: Vec<f64> = trace.keys(head)[..length].iter().map(score).collect();
                    best(&scores, 20)
                });
            }
        }
    }
}

/// Without calibration: the channels of the prompt's last tokens.
#[test]
fn channels_come_from_the_prompt() {
    for tested in quick_devices("read_subset") {
        let traces = traces(2, &tested.device);
        let config = json!({"policy": "double-sparsity", "budget": 20, "labels": 4, "window": 10});
        let channels: Vec<Vec<Vec<usize>>> = traces
            .iter()
            .map(|trace| {
                let of_head = |head: usize| {
                    let tokens = trace.tokens - 10..trace.tokens;
                    let mean = |c: usize| -> f64 {
                        let product =
                            |t: usize| (trace.query(head, t)[c] * trace.keys(head)[t][c]).abs();
                        tokens.clone().map(product).sum()
                    };
                    best(&(0..DIM).map(mean).collect::<Vec<_>>(), 4)
                };
                (0..4).map(of_head).collect()
            })
            .collect();
        follow(&config, &traces, DEEP, &mut |_, row, head, length| {
            let trace = &traces[row];
            let query = trace.query(head, length - 1);
            let score = |key: &Vec<f64>| -> f64 {
                channels[row][head].iter().map(|&c| query[c] * key[c]).sum()
            };
            let scores: Vec<f64> = trace.keys(head)[..length].iter().map(score).collect();
            best(&scores, 20)
        });
    }
}
